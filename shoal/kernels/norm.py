"""RMSNorm in Triton, alone and after the residual sum. One program a row: a row is read once and stays in registers.

T tokens · D hidden. Oracle: reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_rows
from shoal.kernels.pdl import pdl_options, wait_for_inputs

ELEMENTS_PER_THREAD = 8    # of 16 bits: one 16-byte access


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    row = tl.program_id(0).to(tl.int64) * D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + columns, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / D + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row + columns, (normed * weight.to(tl.float32)).to(x.dtype), mask=mask)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    assert x_TD.is_contiguous()
    out_TD = empty_rows(x_TD, *x_TD.shape)
    _launch(x_TD, x_TD, weight_D, out_TD, eps, add=False)
    return out_TD


def add_rms_norm(x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns the norm of the sum."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    out_TD = empty_rows(x_TD, *x_TD.shape)
    _launch(x_TD, residual_TD, weight_D, out_TD, eps, add=True)
    return out_TD


def _launch(x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, out_TD: torch.Tensor, eps: float, add: bool) -> None:
    size = x_TD.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 16)
    _rms_norm_kernel[(x_TD.numel() // size,)](x_TD, residual_TD, weight_D, out_TD, eps, D=size, ADD=add, BLOCK=block, num_warps=warps,
                                              **pdl_options())
