"""Norms before and after two branches of a layer that work on the same residual (an MLP and experts next to
it), a Triton kernel each. A row is read once and stays in registers.

T tokens · D hidden. The oracle is reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.norm import norm_warps, normed_row, plus_normed_row
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import next_power_of_2


@triton.jit
def _fork_norms_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    first_weight_ptr,
    second_weight_ptr,
    third_weight_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * D + columns, columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    first_weight = tl.load(first_weight_ptr + columns, mask=mask, other=0.0)
    second_weight = tl.load(second_weight_ptr + columns, mask=mask, other=0.0)
    third_weight = tl.load(third_weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual_ptr + at, mask=mask, other=0.0)
    total = plus_normed_row(before, x, weight, eps, D)
    tl.store(residual_ptr + at, total, mask=mask)
    x = total.to(tl.float32)
    tl.store(first_ptr + at, normed_row(x, first_weight, eps, D).to(DTYPE), mask=mask)
    tl.store(second_ptr + at, normed_row(x, second_weight, eps, D).to(DTYPE), mask=mask)
    tl.store(third_ptr + at, normed_row(x, third_weight, eps, D).to(DTYPE), mask=mask)


@triton.jit
def _join_norms_kernel(
    x_ptr,
    beside_ptr,
    x_weight_ptr,
    beside_weight_ptr,
    weight_ptr,
    residual_ptr,
    factor_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    at, mask = tl.program_id(0).to(tl.int64) * D + columns, columns < D
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if beside_ptr is not None:
        x_weight = tl.load(x_weight_ptr + columns, mask=mask, other=0.0)
        beside_weight = tl.load(beside_weight_ptr + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual_ptr + at, mask=mask, other=0.0)
    if beside_ptr is not None:
        beside = tl.load(beside_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = normed_row(x, x_weight, eps, D).to(DTYPE).to(tl.float32)
        x += normed_row(beside, beside_weight, eps, D).to(DTYPE).to(tl.float32)
        x = x.to(DTYPE).to(tl.float32)
    total = plus_normed_row(before, x, weight, eps, D)
    if factor_ptr is not None:
        total = (total.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(DTYPE)
    tl.store(residual_ptr + at, total, mask=mask)


def fork_norms(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    next_weights: Sequence[torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """As reference.fork_norms."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous() and len(next_weights) == 3
    outs = tuple(empty_matmul_input(x_TD, *x_TD.shape) for _ in next_weights)
    rows, size = x_TD.shape
    block = next_power_of_2(size)
    _fork_norms_kernel[(rows,)](
        x_TD,
        weight_D,
        residual_TD,
        *next_weights,
        *outs,
        eps,
        D=size,
        BLOCK=block,
        num_warps=norm_warps(block, rows),
        **pdl_options(),
    )
    return outs


def join_norms(
    x_TD: torch.Tensor,
    beside_TD: torch.Tensor | None,
    branch_weights: Sequence[torch.Tensor],
    weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    eps: float,
    factor: torch.Tensor | None,
) -> None:
    """As reference.join_norms."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    assert beside_TD is None or (beside_TD.is_contiguous() and len(branch_weights) == 2)
    x_weight, beside_weight = (None, None) if beside_TD is None else branch_weights
    rows, size = x_TD.shape
    block = next_power_of_2(size)
    _join_norms_kernel[(rows,)](
        x_TD,
        beside_TD,
        x_weight,
        beside_weight,
        weight_D,
        residual_TD,
        factor,
        eps,
        D=size,
        BLOCK=block,
        num_warps=norm_warps(block, rows),
        **pdl_options(),
    )
