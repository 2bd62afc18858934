"""Fp8Rows: activations in fp8 (e4m3), which matmuls of fp8 with fp8 take; and their rounding in plain
PyTorch, the oracle of fp8_quantize.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.quant.fp8_tensor import LARGEST

SMALLEST = 1e-12  # A group of zeros has the scale that a largest number of this size has.


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A number is its fp8 number times the scale of its row, or of its row and group of columns.

    data: float8_e4m3fn [T, I]. scales: float32 [groups, T], so that rows which are multiplied together have
    their scales side by side. dtype: what the numbers were, and what a matmul of them is."""

    data: torch.Tensor
    scales: torch.Tensor
    group: int  # columns that share a scale; 0: all of a row
    dtype: torch.dtype

    def __len__(self) -> int:  # rows, as a tensor's len is
        return self.data.shape[0]

    def dequantize(self) -> torch.Tensor:
        """float32 [T, I]."""
        size = self.group or self.data.shape[1]
        of_each = self.scales.T.repeat_interleave(size, dim=1)[:, : self.data.shape[1]]
        return self.data.float() * of_each


def quantize_rows(x_TI: torch.Tensor, group: int) -> Fp8Rows:
    """Rounds rows to fp8, so that the largest number of each group is the largest one that there is."""
    inputs = x_TI.shape[1]
    size = group or inputs
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % size))
    groups = padded.unflatten(1, (-1, size))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=SMALLEST) / LARGEST
    data = (groups * (1.0 / scales)).to(torch.float8_e4m3fn).flatten(1)[:, :inputs]
    return Fp8Rows(data.contiguous(), scales.squeeze(2).T.contiguous(), group, x_TI.dtype)
