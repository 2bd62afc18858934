"""`logit_bias`: numbers that are added to the logits of some tokens. logit_bias_triton.py has the kernel."""

from __future__ import annotations

import torch

from shoal.kernels.sampling.row_options import Option, RowOptions


def add_bias(logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None:
    """Adds each row's biases."""
    for k, _, one in options.rows(rows_K):
        if count := one.fields[Option.BIAS_COUNT]:
            values_at = one.fields[Option.BIAS_START] + count
            values = one.lists[values_at : values_at + count].view(torch.float32)
            logits_KV[k, one.ids(Option.BIAS_START)] += values
