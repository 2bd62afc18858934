"""The tokens of rows with options, before and after a sample (row_options.py).

The token at a position is stored when the position's KV has been computed, as only then the row surely has a
block for it. Until then it waits among the row's options, as LAST.
"""

from __future__ import annotations

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def take_rows(logits_SV: torch.Tensor, samples_K: torch.Tensor, out_KV: torch.Tensor) -> None:
    """out[k] = logits[samples[k]]; rows of padding (-1) have no defined content."""
    out_KV.copy_(logits_SV.index_select(0, samples_K.clamp(min=0)))


def remember_last(rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions) -> None:
    """Stores each row's LAST as its token at positions[k]."""
    size = options.history.shape[1]
    positions = positions_K.tolist()
    for k, row, one in options.rows(rows_K):
        if one.fields[Option.READS_HISTORY]:
            block = options.block_tables_RM[row, positions[k] // size]
            options.history[block, positions[k] % size] = one.fields[Option.LAST]


def set_last(
    samples_K: torch.Tensor,
    rows_K: torch.Tensor,
    tokens_K: torch.Tensor,
    sampled_S: torch.Tensor,
    options: RowOptions,
) -> None:
    """sampled[samples[k]] = tokens[k], but for padding (-1), and each row's LAST is its token."""
    there_K = samples_K >= 0
    sampled_S[samples_K[there_K].long()] = tokens_K[there_K]
    options.fields_RO[:, Option.LAST][rows_K[rows_K >= 0].long()] = tokens_K[rows_K >= 0]
