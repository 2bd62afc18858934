"""Activations become fp8 where they are made: after a norm, with or without the residual sum before it, and
after SiLU(gate) * up. What neither of them makes, attention's output, has a pass of its own.

A row's scale is known when all of it is, so one program has a whole row in its registers; scales of groups of
128 columns need no more than these. Numbers are rounded to the activations' type first, as the kernels that
write those round them. T rows · I, D columns · F intermediate. The oracle is fp8_tensor.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import activate
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.quant.fp8_tensor import LARGEST, SMALLEST, Fp8Rows
from shoal.kernels.rounding import cdiv, next_power_of_2

BLOCK = 1024  # columns of a program where groups are smaller than rows
ELEMENTS_PER_THREAD = 16
MAX_WARPS = 16
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


@triton.jit
def _to_fp8(y, SCALE_GROUP: tl.constexpr):
    """From float32 [C] to fp8 [C] and scales [C / SCALE_GROUP]."""
    groups = tl.reshape(y, (y.shape[0] // SCALE_GROUP, SCALE_GROUP))
    scales = tl.maximum(tl.max(tl.abs(groups), axis=1), _SMALLEST) / _LARGEST
    return tl.reshape((groups * (1.0 / scales)[:, None]).to(tl.float8e4nv), (y.shape[0],)), scales


@triton.jit
def _store_fp8(y, out_ptr, scales_ptr, row, T, I, first, SCALE_GROUP: tl.constexpr):
    """Stores columns `first` and up of a row."""
    data, scales = _to_fp8(y, SCALE_GROUP)
    column = first + tl.arange(0, y.shape[0])
    tl.store(out_ptr + row * I + column, data, mask=column < I)
    group = first // SCALE_GROUP + tl.arange(0, y.shape[0] // SCALE_GROUP)
    tl.store(scales_ptr + group.to(tl.int64) * T + row, scales, mask=group * SCALE_GROUP < I)


@triton.jit(do_not_specialize=["T"])
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    T,
    I,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: x is [T, 2I], gate beside up, and activation(gate) * up is rounded."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    x_ptr += row * I * (1 + GATED)
    wait_for_inputs(PDL)
    y = tl.load(x_ptr + column, mask=column < I, other=0.0)
    if GATED:
        up = tl.load(x_ptr + I + column, mask=column < I, other=0.0)
        y = (activate(y.to(tl.float32), ACTIVATION) * up.to(tl.float32)).to(y.dtype)
    _store_fp8(y.to(tl.float32), out_ptr, scales_ptr, row, T, I, first, SCALE_GROUP)


@triton.jit(do_not_specialize=["T"])
def _rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    eps,
    T,
    D: tl.constexpr,
    ADD: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """norm.py's kernel of one row, whose result leaves as fp8."""
    column = tl.arange(0, BLOCK)
    row, mask = tl.program_id(0).to(tl.int64), column < D
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * D + column, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual_ptr + row * D + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + before.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * D + column, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32) / D + eps)
    normed = (x32 * scale).to(weight.dtype).to(tl.float32)
    y = (normed * weight.to(tl.float32)).to(x.dtype).to(tl.float32)
    _store_fp8(y, out_ptr, scales_ptr, row, T, D, 0, SCALE_GROUP)


def quantize(x_TI: torch.Tensor, group: int) -> Fp8Rows:
    return _quantize(x_TI, x_TI.shape[1], group, None)


def gate_mul_fp8(gate_up_T2F: torch.Tensor, group: int, activation: str = "silu") -> Fp8Rows:
    """activation(gate) * up in fp8."""
    return _quantize(gate_up_T2F, gate_up_T2F.shape[1] // 2, group, activation)


def rms_norm_fp8(
    x_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, group: int
) -> Fp8Rows:
    """The norm of the residual in fp8. With `x_TD`, that is added to the residual first, in place."""
    assert residual_TD.is_contiguous() and (x_TD is None or x_TD.is_contiguous())
    rows, size = residual_TD.shape
    out = _empty(residual_TD, size, group)
    block = max(group, next_power_of_2(size))
    _rms_norm_fp8_kernel[(rows,)](
        residual_TD if x_TD is None else x_TD,
        residual_TD,
        weight_D,
        out.data,
        out.scales,
        eps,
        rows,
        D=size,
        ADD=x_TD is not None,
        SCALE_GROUP=group or block,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_options(),
    )
    return out


def _quantize(x: torch.Tensor, size: int, group: int, activation: str | None) -> Fp8Rows:
    assert x.is_contiguous()
    out = _empty(x, size, group)
    block = max(group, min(BLOCK, next_power_of_2(size))) if group else next_power_of_2(size)
    _quantize_kernel[(len(x), cdiv(size, block))](
        x,
        out.data,
        out.scales,
        len(x),
        size,
        GATED=activation is not None,
        ACTIVATION=activation,
        SCALE_GROUP=group or block,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_options(),
    )
    return out


def _empty(like: torch.Tensor, size: int, group: int) -> Fp8Rows:
    rows = len(like)
    return Fp8Rows(
        like.new_empty(rows, size, dtype=torch.float8_e4m3fn),
        like.new_empty(cdiv(size, group or size), rows, dtype=torch.float32),
        group,
        like.dtype,
    )


def _warps(block: int) -> int:
    return min(max(block // (32 * ELEMENTS_PER_THREAD), 1), MAX_WARPS)
