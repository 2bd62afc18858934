"""The gated RMSNorm of recurrent layers in Triton. The oracle is reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import sigmoid
from shoal.kernels.rounding import cdiv, next_power_of_2

ELEMENTS = 1024  # a program has as many, where parts are smaller


@triton.jit
def norm_and_gate(
    x, gate, weight, eps, SIZE: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr = False
):
    """Returns the rows of x, parts of SIZE numbers, normed, weighted and gated. The gate is in float32."""
    if SIGMOID:
        gate = sigmoid(gate)
    else:
        gate *= sigmoid(gate)
    x32 = x.to(tl.float32)
    if GATE_FIRST:
        x32 *= gate
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / SIZE + eps)
    normed = (x32 * scale[:, None]).to(x.dtype).to(tl.float32)
    weighted = (normed * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    if not GATE_FIRST:
        weighted *= gate
    return weighted.to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_rows,
    stride_x,
    stride_gate,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row is a part of a token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (columns < SIZE)
    token, column = (row // PARTS).to(tl.int64)[:, None], (row % PARTS * SIZE)[:, None] + columns
    weight = tl.load(weight_ptr + column % WEIGHTS, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    gated = norm_and_gate(x, gate, weight, eps, SIZE, GATE_FIRST, SIGMOID)
    tl.store(out_ptr + token * (PARTS * SIZE) + column, gated, mask=mask)


def gated_norm(
    x_TX: torch.Tensor,
    gate_TX: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    size: int,
    gate_first: bool,
    activation: str = "silu",
) -> torch.Tensor:
    """As reference.gated_norm."""
    num_tokens, width = x_TX.shape
    assert x_TX.stride(1) == gate_TX.stride(1) == 1 and gate_TX.shape == x_TX.shape and width % size == 0
    assert weight.is_contiguous() and weight.numel() in (size, width)
    assert weight.dtype in (x_TX.dtype, torch.float32)
    out_TX = empty_matmul_input(x_TX, num_tokens, width)
    block = next_power_of_2(size)
    rows, num_rows = max(ELEMENTS // block, 1), num_tokens * (width // size)
    if num_rows:
        _gated_norm_kernel[(cdiv(num_rows, rows),)](
            x_TX,
            gate_TX,
            weight,
            out_TX,
            eps,
            num_rows,
            x_TX.stride(0),
            gate_TX.stride(0),
            PARTS=width // size,
            SIZE=size,
            WEIGHTS=weight.numel(),
            GATE_FIRST=gate_first,
            SIGMOID=activation == "sigmoid",
            ROWS=rows,
            BLOCK=block,
            num_warps=min(max(rows * block // 256, 1), 16),
            **pdl_options(),
        )
    return out_TX
