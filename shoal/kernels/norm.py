"""RMSNorm in Triton: alone, after the residual sum, and before it.

A row is read once and stays in registers. There is one program for each row. If there are thousands, a
program takes two rows, because the GPU starts a limited number of programs per microsecond, whatever they
do. The sum of a row has the same order in both cases, so the same bits. T tokens · D hidden. The oracle is
reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2

ELEMENTS_PER_THREAD = 8  # 16 bits each: one access of 16 bytes
MANY_ELEMENTS = 32  # the same where there are many rows
MANY_ROWS = 2048  # From as many rows on a program takes two (benchmarks/results/kernels.md).


@triton.jit(do_not_specialize=["T"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    T,
    D: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    at = rows * D + columns
    mask = columns < D
    first = tl.program_id(0).to(tl.int64) * ROWS * D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if ROWS > 1:
        mask &= tl.program_id(0) * ROWS + rows < T
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + first + at, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + first + at, mask=mask, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual_ptr + first + at, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / D + eps)
    normed = (x32 * scale[:, None]).to(weight.dtype).to(tl.float32)
    tl.store(out_ptr + first + at, (normed * weight.to(tl.float32)).to(x.dtype), mask=mask)


@triton.jit
def normed_row(x, weight, eps, D: tl.constexpr):
    """The norm of one row in float32, as rms_norm rounds it before it is stored."""
    normed = (x * tl.rsqrt(tl.sum(x * x) / D + eps)).to(weight.dtype).to(tl.float32)
    return normed * weight.to(tl.float32)


@triton.jit
def plus_normed_row(before, x, weight, eps, D: tl.constexpr):
    """before + the norm of x, rounded twice, in the dtype of `before`."""
    normed = normed_row(x, weight, eps, D).to(before.dtype)
    return (before.to(tl.float32) + normed.to(tl.float32)).to(before.dtype)


@triton.jit
def _add_normed_kernel(
    x_ptr,
    weight_ptr,
    eps,
    residual_ptr,
    next_weight_ptr,
    next_eps,
    out_ptr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * D + columns, columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if next_weight_ptr is not None:
        next_weight = tl.load(next_weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual_ptr + at, mask=mask, other=0.0)
    total = plus_normed_row(before, x, weight, eps, D)
    tl.store(residual_ptr + at, total, mask=mask)
    if next_weight_ptr is not None:
        normed = normed_row(total.to(tl.float32), next_weight, next_eps, D)
        tl.store(out_ptr + at, normed.to(total.dtype), mask=mask)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    assert x_TD.is_contiguous()
    out_TD = empty_matmul_input(x_TD, *x_TD.shape)
    _launch(x_TD, x_TD, weight_D, out_TD, eps, add=False)
    return out_TD


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place; returns the norm of the sum."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    out_TD = empty_matmul_input(x_TD, *x_TD.shape)
    _launch(x_TD, residual_TD, weight_D, out_TD, eps, add=True)
    return out_TD


def add_normed(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    next_weight_D: torch.Tensor | None = None,
    next_eps: float = 0.0,
) -> torch.Tensor | None:
    """residual += the norm of x, in place. With `next_weight_D`, returns the next norm, of that sum."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    out_TD = None if next_weight_D is None else empty_matmul_input(x_TD, *x_TD.shape)
    rows, size = x_TD.shape
    block = next_power_of_2(size)
    _add_normed_kernel[(rows,)](
        x_TD,
        weight_D,
        eps,
        residual_TD,
        next_weight_D,
        next_eps,
        out_TD,
        D=size,
        BLOCK=block,
        num_warps=norm_warps(block, rows),
        **pdl_options(),
    )
    return out_TD


def norm_warps(block: int, rows: int = 1) -> int:
    """Returns the warps of a program of one row. With many rows there are fewer, so that more programs share
    an SM; sums then have another order."""
    elements = MANY_ELEMENTS if rows >= MANY_ROWS else ELEMENTS_PER_THREAD
    return min(max(block // (32 * elements), 1), 16)


def _launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    out_TD: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    size = x_TD.shape[-1]
    num_rows = x_TD.numel() // size
    block = next_power_of_2(size)
    rows = 2 if num_rows >= MANY_ROWS and block <= 8192 else 1
    _rms_norm_kernel[(cdiv(num_rows, rows),)](
        x_TD,
        residual_TD,
        weight_D,
        out_TD,
        eps,
        num_rows,
        D=size,
        ADD=add,
        ROWS=rows,
        BLOCK=block,
        num_warps=norm_warps(block),
        **pdl_options(),
    )
