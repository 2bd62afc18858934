"""`min_tokens`: no stop token ends an answer that is too short. min_tokens_triton.py has the kernel."""

from __future__ import annotations

import math

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def ban_stops(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    """The stop tokens of a row become impossible if its sample has a position, positions[k] + 1, below
    MIN_END."""
    positions = positions_K.tolist()
    for k, _, one in options.rows(rows_K):
        if positions[k] + 1 < one.fields[Option.MIN_END]:
            logits_KV[k, one.ids(Option.STOPS_START)] = -math.inf
