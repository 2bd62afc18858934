"""Matmuls of each head with a matrix of its own, in Triton: queries with K (absorbed into what latents are
compared with), and sums of latents with V.

A decode step has few rows, and reads each head's matrix once: a program works on some outputs of one head.
The sums of few tokens come in parts, as attention has split the keys, and are joined here. The oracle and
the dimensions are in reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.attention.paged_attention import LOWEST
from shoal.kernels.latent.attention import LatentParts, split_keys
from shoal.kernels.pdl import pdl_options, start_next, wait_for_inputs, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.attention import QueryScaling

MAX_TILE = 64  # rows of a tile
TILE_OUTS, FEW_TILE_OUTS = 64, 32  # outputs of a program, and of one for few tokens
FEW_TOKENS = 4  # More of them read a head's matrix together.


@triton.jit
def query_factor(positions, BETA: tl.constexpr, LENGTH: tl.constexpr, OFFSET: tl.constexpr):
    """QueryScaling's factor of queries at these positions."""
    steps = ((positions + OFFSET) // LENGTH).to(tl.float32)
    return 1.0 + BETA * tl.log(1.0 + steps)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos_sin_ptr,
    positions,
    factor,
    there,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotates the numbers from x_ptr on into those from out_ptr on. [rows, 1] are all but the constants."""
    j = tl.arange(0, HALF_PAD)[None, :]
    mask = there & (j < ROTARY // 2)
    angle_ptr = cos_sin_ptr + positions.to(tl.int64) * ROTARY + j
    cos = tl.load(angle_ptr, mask=mask, other=0.0)
    sin = tl.load(angle_ptr + ROTARY // 2, mask=mask, other=0.0)
    if INTERLEAVED:
        first = tl.load(x_ptr + 2 * j, mask=mask, other=0.0)
        second = tl.load(x_ptr + 2 * j + 1, mask=mask, other=0.0)
    else:
        first = tl.load(x_ptr + j, mask=mask, other=0.0)
        second = tl.load(x_ptr + ROTARY // 2 + j, mask=mask, other=0.0)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    tl.store(out_ptr + j, ((x1 * cos - x2 * sin) * factor).to(first.dtype), mask=mask)
    tl.store(out_ptr + ROTARY // 2 + j, ((x2 * cos + x1 * sin) * factor).to(first.dtype), mask=mask)


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
    more tile of outputs rotates x's numbers from K on, and writes them to out from N on."""
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
        _rotate(x_ptr + K, out_ptr + N, cos_sin_ptr, positions, factor, there, ROTARY, INTERLEAVED, HALF_PAD)
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


@triton.jit
def _join(partial_ptr, lse_ptr, at, stride_part, active, K: tl.constexpr, K_PAD: tl.constexpr):
    """The weighted sum of row `at`'s partial results, [K_PAD]."""
    AT_ONCE: tl.constexpr = 8
    k = tl.arange(0, K_PAD)
    part = tl.arange(0, AT_ONCE)
    sums = tl.zeros((K_PAD,), tl.float32)
    total = 0.0
    highest = LOWEST
    for first in range(0, active, AT_ONCE):
        there = first + part < active
        rows = (first + part).to(tl.int64) * stride_part + at
        lse = tl.load(lse_ptr + rows, mask=there, other=LOWEST)
        x = tl.load(
            partial_ptr + rows[:, None] * K_PAD + k[None, :],
            mask=there[:, None] & (k < K)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(lse, axis=0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.where(there, tl.exp2(lse - new_highest), 0.0)
        sums = sums * shrink + tl.sum(x * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        highest = new_highest
    return sums / total


@triton.jit(do_not_specialize=["stride_part", "splits", "min_split"])
def _few_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    cos_sin_ptr,
    positions_ptr,
    kv_lens_ptr,
    lse_ptr,
    stride_xt,
    stride_xh,
    stride_wh,
    stride_wk,
    stride_wn,
    stride_ot,
    stride_oh,
    stride_part,
    splits,
    min_split,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BETA: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_heads_kernel` for few tokens, elementwise: a program has its part of the matrix before it waits. The
    grid is (tokens, heads, tiles of outputs). QUERIES > 0: x are partial results of attention, whose tokens
    are as many of a sequence."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    k = tl.arange(0, K_PAD)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = w_ptr + head.to(tl.int64) * stride_wh + k[:, None] * stride_wk + columns[None, :] * stride_wn
    w = tl.load(w_ptrs, mask=(k < K)[:, None] & (columns < N)[None, :], other=0.0)
    out_ptr += token * stride_ot + head * stride_oh
    factor = 1.0
    if ROTARY > 0:
        position = tl.maximum(tl.load(positions_ptr + token, cache_modifier=".cg"), 0)
        if BETA != 0.0:
            factor = query_factor(position, BETA, LENGTH, OFFSET)
    active = 1
    if QUERIES > 0:
        kv_len = tl.load(kv_lens_ptr + token // QUERIES, cache_modifier=".cg")
        active = split_keys(kv_len, splits, min_split, KEYS)[1]
    wait_for_previous(PDL)
    if QUERIES > 0:
        x = _join(x_ptr, lse_ptr, token * H + head, stride_part, active, K, K_PAD)
    else:
        x_ptr += token * stride_xt + head * stride_xh
        if ROTARY > 0 and tile * BLOCK_N >= N:
            one = tl.zeros((1, 1), tl.int64)
            _rotate(
                x_ptr + K + one,
                out_ptr + N + one,
                cos_sin_ptr,
                position + one,
                factor,
                one == 0,
                ROTARY,
                INTERLEAVED,
                HALF_PAD,
            )
            return
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    result = tl.sum(w.to(tl.float32) * x[:, None], axis=0) * factor
    tl.store(out_ptr + columns, result.to(out_ptr.dtype.element_ty), mask=columns < N)


def absorb_queries(
    q_THX: torch.Tensor,
    kv_b_HWC: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool,
    scaling: QueryScaling | None,
    few: bool = False,
) -> torch.Tensor:
    """As reference.absorb_queries. `few`: these are few enough that each reads the matrices for itself."""
    num_tokens, num_heads, query_dim = q_THX.shape
    size, rotary = kv_b_HWC.shape[2], cos_sin.shape[1]
    out_THN = q_THX.new_empty(num_tokens, num_heads, size + rotary)
    strides = kv_b_HWC.stride(0), kv_b_HWC.stride(1), kv_b_HWC.stride(2)
    rotation = cos_sin, positions_T, interleaved, scaling
    _launch(q_THX, kv_b_HWC, out_THN, strides, query_dim - rotary, size, few, *rotation)
    return out_THN


def project_values(x: torch.Tensor | LatentParts, kv_b_HWC: torch.Tensor, out_THV: torch.Tensor) -> None:
    """Writes out_THV as reference.project_values computes it of sums of latents, [T, H, C], or of the parts
    of them that attention has left."""
    size, v_head_dim = kv_b_HWC.shape[2], out_THV.shape[2]
    v_HVC = kv_b_HWC[:, -v_head_dim:]
    strides = v_HVC.stride(0), v_HVC.stride(2), v_HVC.stride(1)
    _launch(x, v_HVC, out_THV, strides, size, v_head_dim, isinstance(x, LatentParts))


def _launch(
    x: torch.Tensor | LatentParts,
    w: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, int, int],
    inputs: int,
    outputs: int,
    few: bool,
    cos_sin: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    interleaved: bool = False,
    scaling: QueryScaling | None = None,
) -> None:
    """`strides`: those of `w` by head, input and output."""
    parts = x if isinstance(x, LatentParts) else None
    numbers = x.partial if isinstance(x, LatentParts) else x
    num_rows, num_heads = out.shape[:2]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    assert numbers.stride(-1) == 1 and out.stride(2) == 1
    block_n = min(max(16, next_power_of_2(outputs)), FEW_TILE_OUTS if few else TILE_OUTS)
    tiles = num_heads, cdiv(outputs, block_n) + (rotary > 0)
    shared = dict(
        K=inputs,
        N=outputs,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        BETA=0.0 if scaling is None else scaling.beta,
        LENGTH=1 if scaling is None else scaling.length,
        OFFSET=0 if scaling is None else scaling.offset,
        HALF_PAD=next_power_of_2(max(1, rotary // 2)),
        BLOCK_N=block_n,
        **pdl_options(),
    )
    x_strides = (0, 0) if parts else (numbers.stride(0), numbers.stride(1))
    tensors = (
        numbers,
        w,
        out,
        numbers if cos_sin is None else cos_sin,
        numbers if positions_T is None else positions_T,
    )
    if few:
        _few_kernel[(num_rows, *tiles)](
            *tensors,
            parts.kv_lens_S if parts else numbers,
            parts.lse if parts else numbers,
            *x_strides,
            *strides,
            out.stride(0),
            out.stride(1),
            num_rows * num_heads,
            parts.splits if parts else 1,
            parts.min_split if parts else 1,
            H=num_heads,
            QUERIES=parts.queries if parts else 0,
            KEYS=parts.keys if parts else 1,
            K_PAD=max(16, next_power_of_2(inputs)),
            num_warps=4,
            **shared,
        )
        return
    assert parts is None
    block_m = max(16, min(next_power_of_2(num_rows), MAX_TILE))
    _heads_kernel[(cdiv(num_rows, block_m), *tiles)](
        *tensors,
        num_rows,
        *x_strides,
        *strides,
        out.stride(0),
        out.stride(1),
        BLOCK_M=block_m,
        BLOCK_K=min(max(16, next_power_of_2(inputs)), 32 if numbers.dtype == torch.float32 else 64),
        num_warps=4,
        num_stages=3,
        **shared,
    )
