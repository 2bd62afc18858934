"""Matmuls of each head with a matrix of its own, in Triton: queries with K (absorbed into what latents are
compared with), and sums of latents with V.

A decode step has few rows, and reads each head's matrix once: a program works on some outputs of one head.
The oracle and the dimensions are in reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.attention import QueryScaling

MAX_TILE = 64  # rows of a tile


@triton.jit
def query_factor(positions, BETA: tl.constexpr, LENGTH: tl.constexpr, OFFSET: tl.constexpr):
    """QueryScaling's factor of queries at these positions."""
    steps = ((positions + OFFSET) // LENGTH).to(tl.float32)
    return 1.0 + BETA * tl.log(1.0 + steps)


@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    cos_sin_ptr,
    positions_ptr,
    num_rows,
    stride_xt,
    stride_xh,
    stride_wh,
    stride_wk,
    stride_wn,
    stride_ot,
    stride_oh,
    K: tl.constexpr,
    N: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BETA: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h, :N] = x[t, h, :K] w[h]. The grid is (tiles of rows, heads, tiles of outputs). ROTARY: one
    more tile of outputs rotates the numbers of x behind K into those of out behind N."""
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    there = (rows < num_rows)[:, None]
    x_ptr += rows.to(tl.int64)[:, None] * stride_xt + head * stride_xh
    out_ptr += rows.to(tl.int64)[:, None] * stride_ot + head * stride_oh
    factor = tl.full((BLOCK_M, 1), 1.0, tl.float32)
    if ROTARY > 0:
        positions = tl.maximum(tl.load(positions_ptr + rows, mask=rows < num_rows, other=0), 0)[:, None]
        if BETA != 0.0:
            factor = query_factor(positions, BETA, LENGTH, OFFSET)
    if ROTARY > 0 and tile * BLOCK_N >= N:
        j = tl.arange(0, HALF_PAD)[None, :]
        mask = there & (j < ROTARY // 2)
        angle_ptr = cos_sin_ptr + positions.to(tl.int64) * ROTARY + j
        cos = tl.load(angle_ptr, mask=mask, other=0.0)
        sin = tl.load(angle_ptr + ROTARY // 2, mask=mask, other=0.0)
        if INTERLEAVED:
            first = tl.load(x_ptr + K + 2 * j, mask=mask, other=0.0)
            second = tl.load(x_ptr + K + 2 * j + 1, mask=mask, other=0.0)
        else:
            first = tl.load(x_ptr + K + j, mask=mask, other=0.0)
            second = tl.load(x_ptr + K + ROTARY // 2 + j, mask=mask, other=0.0)
        x1, x2 = first.to(tl.float32), second.to(tl.float32)
        tl.store(out_ptr + N + j, ((x1 * cos - x2 * sin) * factor).to(first.dtype), mask=mask)
        tl.store(out_ptr + N + ROTARY // 2 + j, ((x2 * cos + x1 * sin) * factor).to(first.dtype), mask=mask)
        return
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptr += head.to(tl.int64) * stride_wh + columns[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k[None, :], mask=there & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + k[:, None] * stride_wk, mask=(k < K)[:, None] & (columns < N)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    tl.store(
        out_ptr + columns[None, :],
        (acc * factor).to(out_ptr.dtype.element_ty),
        mask=there & (columns < N)[None, :],
    )


def absorb_queries(
    q_THX: torch.Tensor,
    kv_b_HWC: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool,
    scaling: QueryScaling | None,
) -> torch.Tensor:
    """As reference.absorb_queries."""
    num_tokens, num_heads, query_dim = q_THX.shape
    size, rotary = kv_b_HWC.shape[2], cos_sin.shape[1]
    out_THN = q_THX.new_empty(num_tokens, num_heads, size + rotary)
    strides = kv_b_HWC.stride(0), kv_b_HWC.stride(1), kv_b_HWC.stride(2)
    rotation = cos_sin, positions_T, interleaved, scaling
    _launch(q_THX, kv_b_HWC, out_THN, strides, query_dim - rotary, size, *rotation)
    return out_THN


def project_values(sums_THC: torch.Tensor, kv_b_HWC: torch.Tensor, out_THV: torch.Tensor) -> None:
    """Writes out_THV as reference.project_values computes it."""
    size, v_head_dim = kv_b_HWC.shape[2], out_THV.shape[2]
    v_HVC = kv_b_HWC[:, -v_head_dim:]
    strides = v_HVC.stride(0), v_HVC.stride(2), v_HVC.stride(1)
    _launch(sums_THC, v_HVC, out_THV, strides, size, v_head_dim)


def _launch(
    x_THK: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, int, int],
    inputs: int,
    outputs: int,
    cos_sin: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    interleaved: bool = False,
    scaling: QueryScaling | None = None,
) -> None:
    """`strides`: those of `w` by head, input and output."""
    num_rows, num_heads = x_THK.shape[:2]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    assert x_THK.stride(2) == 1 and out.stride(2) == 1
    wide = x_THK.dtype == torch.float32
    block_m = max(16, min(next_power_of_2(num_rows), MAX_TILE))
    block_n = min(max(16, next_power_of_2(outputs)), 64)
    block_k = min(max(16, next_power_of_2(inputs)), 32 if wide else 64)
    grid = cdiv(num_rows, block_m), num_heads, cdiv(outputs, block_n) + (rotary > 0)
    _heads_kernel[grid](
        x_THK,
        w,
        out,
        x_THK if cos_sin is None else cos_sin,
        x_THK if positions_T is None else positions_T,
        num_rows,
        x_THK.stride(0),
        x_THK.stride(1),
        *strides,
        out.stride(0),
        out.stride(1),
        K=inputs,
        N=outputs,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        BETA=0.0 if scaling is None else scaling.beta,
        LENGTH=1 if scaling is None else scaling.length,
        OFFSET=0 if scaling is None else scaling.offset,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HALF_PAD=next_power_of_2(max(1, rotary // 2)),
        num_warps=4,
        num_stages=3,
        **pdl_options(),
    )
