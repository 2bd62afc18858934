"""Samples that are drawn from whole rows, and the tokens of rows with options, before and after a draw
(row_options.py).

The token at a position is stored in the step that computes the position's KV, as only then the row surely has
a block for it. With drafts a row has several samples: the drafts before a sample are stored like any other
token, and the next step overwrites the rejected ones.
"""

from __future__ import annotations

import torch

from shoal.kernels.sampling.row_options import RowOptions, WholeRow


def locate_rows(
    samples_K: torch.Tensor,
    shaped_K: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    tokens_S: torch.Tensor,
    out_XK: torch.Tensor,
) -> None:
    """Writes the columns of WholeRow for chosen samples into `out_XK`. `samples_K` are their indices, and
    shaped[k] > 0 if sample k has options; `rows_S`, `positions_S` and `tokens_S` are of all samples of the
    step. A chosen sample whose row is -1 becomes padding."""
    at_K = samples_K.clamp(min=0).long()
    rows_K = torch.where(samples_K >= 0, rows_S[at_K], -1)
    out_XK[WholeRow.SAMPLE] = torch.where(rows_K >= 0, samples_K, -1)
    out_XK[WholeRow.ROW] = rows_K
    out_XK[WholeRow.POSITION] = positions_S[at_K]
    out_XK[WholeRow.TOKEN] = tokens_S[at_K]
    out_XK[WholeRow.OPTIONS] = torch.where(shaped_K > 0, rows_K, -1)


def take_rows(logits_SV: torch.Tensor, samples_K: torch.Tensor, out_KV: torch.Tensor) -> None:
    """out[k] = logits[samples[k]]; rows of padding (-1) have no defined content."""
    out_KV.copy_(logits_SV.index_select(0, samples_K.clamp(min=0)))


def store_tokens(
    rows_K: torch.Tensor, positions_K: torch.Tensor, tokens_K: torch.Tensor, options: RowOptions
) -> None:
    """Stores tokens[k] as the token of row k at positions[k], where an option reads it."""
    size = options.history.shape[1]
    positions, tokens = positions_K.tolist(), tokens_K.tolist()
    for k, row, one in options.rows(rows_K):
        if one.reads_history:
            block = options.block_tables_RM[row, positions[k] // size]
            options.history[block, positions[k] % size] = tokens[k]


def put_samples(samples_K: torch.Tensor, tokens_K: torch.Tensor, sampled_S: torch.Tensor) -> None:
    """sampled[samples[k]] = tokens[k], but for padding (-1)."""
    there_K = samples_K >= 0
    sampled_S[samples_K[there_K].long()] = tokens_K[there_K]
