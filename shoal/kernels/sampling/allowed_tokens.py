"""`allowed_token_ids`: the only tokens that a row may get. allowed_tokens_triton.py has the kernel."""

from __future__ import annotations

import math

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def keep_allowed(logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None:
    """Every other token becomes impossible in the rows with such a list."""
    for k, _, one in options.rows(rows_K):
        if one.fields[Option.ALLOWED_COUNT]:
            ids = one.ids(Option.ALLOWED_START)
            kept = logits_KV[k, ids]
            logits_KV[k] = -math.inf
            logits_KV[k, ids] = kept
