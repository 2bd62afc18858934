"""One Triton kernel between the matmul that makes latents and attention. It norms the queries' latents and
the keys', rotates the rest, and writes keys' latents into the paged cache.

A program works on one token. The oracle and the dimensions are in reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import next_power_of_2


@triton.jit
def _norm(x, weight, eps, SIZE: tl.constexpr):
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / SIZE + eps)
    return ((x32 * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _norm_rope_store_kernel(
    a_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    q_out_ptr,
    latent_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    rows_ptr,
    tables_ptr,
    cache_ptr,
    stride_a,
    stride_table,
    stride_block,
    BEFORE: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_Q: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_PAD: tl.constexpr,
    C_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token, cache_modifier=".cg")
    row = tl.load(rows_ptr + token, cache_modifier=".cg").to(tl.int64)
    is_token = (position >= 0) & (row >= 0)
    i = tl.arange(0, C_PAD)
    j = tl.arange(0, HALF_PAD)
    in_half = j < ROTARY // 2
    angle_ptr = cos_sin_ptr + tl.maximum(position, 0).to(tl.int64) * ROTARY + j
    cos = tl.load(angle_ptr, mask=in_half, other=0.0)
    sin = tl.load(angle_ptr + ROTARY // 2, mask=in_half, other=0.0)
    kv_weight = tl.load(kv_weight_ptr + i, mask=i < SIZE, other=0.0)
    block = tl.load(
        tables_ptr + row * stride_table + position // BLOCK_SIZE, mask=is_token, other=0, cache_modifier=".cg"
    ).to(tl.int64)
    wait_for_previous(PDL)
    a_ptr += token * stride_a
    if HAS_Q:
        k = tl.arange(0, Q_PAD)
        q_weight = tl.load(q_weight_ptr + k, mask=k < BEFORE, other=0.0)
        q = tl.load(a_ptr + k, mask=k < BEFORE, other=0.0)
        tl.store(q_out_ptr + token * BEFORE + k, _norm(q, q_weight, eps, BEFORE), mask=k < BEFORE)
    a_ptr += BEFORE
    c = _norm(tl.load(a_ptr + i, mask=i < SIZE, other=0.0), kv_weight, eps, SIZE)
    a_ptr += SIZE
    if INTERLEAVED:
        first = tl.load(a_ptr + 2 * j, mask=in_half, other=0.0)
        second = tl.load(a_ptr + 2 * j + 1, mask=in_half, other=0.0)
    else:
        first = tl.load(a_ptr + j, mask=in_half, other=0.0)
        second = tl.load(a_ptr + ROTARY // 2 + j, mask=in_half, other=0.0)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    first = (x1 * cos - x2 * sin).to(first.dtype)
    second = (x2 * cos + x1 * sin).to(first.dtype)
    latent_ptr += token * (SIZE + ROTARY)
    tl.store(latent_ptr + i, c, mask=i < SIZE)
    tl.store(latent_ptr + SIZE + j, first, mask=in_half)
    tl.store(latent_ptr + SIZE + ROTARY // 2 + j, second, mask=in_half)
    if is_token:
        cache_ptr += block * stride_block + (position % BLOCK_SIZE) * (SIZE + ROTARY)
        tl.store(cache_ptr + i, c, mask=i < SIZE)
        tl.store(cache_ptr + SIZE + j, first, mask=in_half)
        tl.store(cache_ptr + SIZE + ROTARY // 2 + j, second, mask=in_half)


def norm_rope_store(
    a_TY: torch.Tensor,
    q_weight: torch.Tensor | None,
    kv_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    interleaved: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """As reference.norm_rope_store."""
    blocks, size, rotary = cache.blocks, kv_weight.shape[0], cos_sin.shape[1]
    num_tokens, before = a_TY.shape[0], a_TY.shape[1] - size - rotary
    assert a_TY.stride(1) == 1 and blocks.stride()[3:] == (size + rotary, 1)
    latent_TN = a_TY.new_empty(num_tokens, size + rotary)
    q_out = latent_TN if q_weight is None else empty_matmul_input(a_TY, num_tokens, before)
    _norm_rope_store_kernel[(num_tokens,)](
        a_TY,
        q_weight if q_weight is not None else kv_weight,
        kv_weight,
        q_out,
        latent_TN,
        eps,
        cos_sin,
        positions_T,
        rows_T,
        block_tables_RM,
        blocks,
        a_TY.stride(0),
        block_tables_RM.stride(0),
        blocks.stride(0),
        BEFORE=before,
        SIZE=size,
        ROTARY=rotary,
        HAS_Q=q_weight is not None,
        INTERLEAVED=interleaved,
        BLOCK_SIZE=blocks.shape[3],
        Q_PAD=next_power_of_2(before),
        C_PAD=next_power_of_2(size),
        HALF_PAD=next_power_of_2(rotary // 2),
        num_warps=4,
        **pdl_options(),
    )
    return None if q_weight is None else q_out, latent_TN
