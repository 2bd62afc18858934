"""Triton attention of prefills in the expanded form: keys and values of each head have been made of latents,
one after the other for each sequence. The rotated part of keys is read from the latents, as all heads share
it. Queries are rotated here, when a tile of them is loaded.

A key has P + E numbers, and P need not be a power of two: it is multiplied in two parts, of which the first
one is a power of two. The oracle and the dimensions are in reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.attention.paged_attention import LOG2_E, LOWEST, AttentionTiles
from shoal.kernels.latent.attention import find_rows, num_row_tiles
from shoal.kernels.latent.project import query_factor
from shoal.kernels.rounding import next_power_of_2
from shoal.kinds.attention import QueryScaling


def expanded_tiles(v_head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    if dtype == torch.float32:
        return AttentionTiles(16, 16, 4, 1)
    return AttentionTiles(128, 64, 8, 2) if v_head_dim <= 128 else AttentionTiles(128, 32, 8, 2)


@triton.jit
def _attend_keys(
    acc,
    total,
    highest,
    q_a,
    q_b,
    q_1,
    q_2,
    kv_ptr,
    latent_ptr,
    positions,
    begin,
    end,
    scale_log2,
    stride_kv,
    stride_latent,
    P: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys [begin, end). Without MASKED these are whole tiles, and every query sees
    all of them."""
    columns = tl.arange(0, BLOCK_N)
    a = tl.arange(0, A_PAD)[None, :]
    half = tl.arange(0, HALF_PAD)[None, :]
    v_dims = tl.arange(0, V_PAD)[None, :]
    for first in range(begin, end, BLOCK_N):
        keys = first + columns
        there = (keys < end)[:, None]
        key_ptr = kv_ptr + keys.to(tl.int64)[:, None] * stride_kv
        rotated_ptr = latent_ptr + keys.to(tl.int64)[:, None] * stride_latent
        k_a = tl.load(key_ptr + a, mask=there & (a < P), other=0.0)
        k_1 = tl.load(rotated_ptr + half, mask=there & (half < HALF), other=0.0)
        k_2 = tl.load(rotated_ptr + HALF + half, mask=there & (half < HALF), other=0.0)
        v = tl.load(key_ptr + P + v_dims, mask=there & (v_dims < V), other=0.0)
        scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
        if P > A_PAD:
            b = A_PAD + tl.arange(0, B_PAD)[None, :]
            k_b = tl.load(key_ptr + b, mask=there & (b < P), other=0.0)
            scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
        scores = tl.dot(q_1, tl.trans(k_1), scores, input_precision="ieee")
        scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(keys[None, :] <= positions, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return acc, total, highest


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tiles"],
    do_not_specialize_on_alignment=["starts_ptr", "key_starts_ptr", "kv_lens_ptr"],
)
def expanded_kernel(
    q_ptr,
    kv_ptr,
    latent_ptr,
    out_ptr,
    cos_sin_ptr,
    starts_ptr,
    key_starts_ptr,
    kv_lens_ptr,
    scale_log2,
    stride_q,
    stride_kv,
    stride_latent,
    first_seq,
    num_seqs,
    num_tiles,
    H: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BETA: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
):
    """The grid is (H * tiles): a tile has BLOCK_M queries of one head. Tiles with most keys come first."""
    HALF: tl.constexpr = ROTARY // 2
    head = tl.program_id(0) % H
    tile = num_tiles - 1 - tl.program_id(0) // H
    seq, first_query = find_rows(starts_ptr, first_seq, num_seqs, tile, 1, BLOCK_M)
    query_start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - query_start
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    key_start = tl.load(key_starts_ptr + seq).to(tl.int64)
    first_pos = kv_len - query_len + first_query
    # All queries see the keys before `diagonal`; some see those from there to `end`.
    diagonal = (first_pos + 1) // BLOCK_N * BLOCK_N
    end = kv_len - query_len + tl.minimum(first_query + BLOCK_M, query_len)

    rows = first_query + tl.arange(0, BLOCK_M)
    is_row = (rows < query_len)[:, None]
    positions = (kv_len - query_len + rows)[:, None]
    tokens = (query_start + rows).to(tl.int64)[:, None]
    a = tl.arange(0, A_PAD)[None, :]
    b = A_PAD + tl.arange(0, B_PAD)[None, :]
    half = tl.arange(0, HALF_PAD)[None, :]
    v_dims = tl.arange(0, V_PAD)[None, :]
    q_ptr += tokens * stride_q + head * (P + ROTARY)
    q_a = tl.load(q_ptr + a, mask=is_row & (a < P), other=0.0)
    q_b = tl.load(q_ptr + b, mask=is_row & (b < P), other=0.0)
    in_half = is_row & (half < HALF)
    if INTERLEAVED:
        first = tl.load(q_ptr + P + 2 * half, mask=in_half, other=0.0)
        second = tl.load(q_ptr + P + 2 * half + 1, mask=in_half, other=0.0)
    else:
        first = tl.load(q_ptr + P + half, mask=in_half, other=0.0)
        second = tl.load(q_ptr + P + HALF + half, mask=in_half, other=0.0)
    angle_ptr = cos_sin_ptr + positions.to(tl.int64) * ROTARY + half
    cos = tl.load(angle_ptr, mask=in_half, other=0.0)
    sin = tl.load(angle_ptr + HALF, mask=in_half, other=0.0)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    q_1 = x1 * cos - x2 * sin
    q_2 = x2 * cos + x1 * sin
    if BETA != 0.0:
        factor = query_factor(positions, BETA, LENGTH, OFFSET)
        q_a = (q_a.to(tl.float32) * factor).to(q_a.dtype)
        q_b = (q_b.to(tl.float32) * factor).to(q_b.dtype)
        q_1 *= factor
        q_2 *= factor
    q_1 = q_1.to(first.dtype)
    q_2 = q_2.to(first.dtype)

    kv_ptr += key_start * stride_kv + head * (P + V)
    latent_ptr += key_start * stride_latent + C
    acc = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    for masked in tl.static_range(2):
        acc, total, highest = _attend_keys(
            acc,
            total,
            highest,
            q_a,
            q_b,
            q_1,
            q_2,
            kv_ptr,
            latent_ptr,
            positions,
            diagonal if masked else 0,
            end if masked else diagonal,
            scale_log2,
            stride_kv,
            stride_latent,
            P,
            V,
            HALF,
            A_PAD,
            B_PAD,
            HALF_PAD,
            V_PAD,
            BLOCK_N,
            masked == 1,
        )
    out_ptrs = out_ptr + tokens * (H * V) + head * V + v_dims
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_row & (v_dims < V))


def expanded_attention(
    q_THX: torch.Tensor,
    kv_LY: torch.Tensor,
    latents_LN: torch.Tensor,
    out_THV: torch.Tensor,
    cos_sin: torch.Tensor,
    query_starts_S: torch.Tensor,
    key_starts_S: torch.Tensor,
    kv_lens_S: torch.Tensor,
    scale: float,
    interleaved: bool,
    scaling: QueryScaling | None,
    *,
    first_seq: int,
    num_tokens: int,
) -> None:
    """Writes out_THV for the sequences from `first_seq` on, which have at most `num_tokens` queries together.
    The latents of sequence s begin at key_starts_S[s]. kv_LY, [L, H * (P + V)], are the keys and values that
    they expand to. The queries are not rotated yet, and a sequence's are the last of its positions."""
    num_heads, query_dim = q_THX.shape[1:]
    v_head_dim, rotary = out_THV.shape[2], cos_sin.shape[1]
    plain, size = query_dim - rotary, latents_LN.shape[1] - rotary
    assert q_THX.stride()[1:] == (query_dim, 1) and out_THV.is_contiguous()
    assert kv_LY.stride(1) == latents_LN.stride(1) == 1
    tiles = expanded_tiles(v_head_dim, q_THX.dtype)
    num_seqs = kv_lens_S.shape[0] - first_seq
    num_tiles = num_row_tiles(num_tokens, num_seqs, 1, tiles.block_m)
    part = max(16, next_power_of_2(plain + 1) // 2)  # the largest power of two that is not above `plain`
    expanded_kernel[(num_heads * num_tiles,)](
        q_THX,
        kv_LY,
        latents_LN,
        out_THV,
        cos_sin,
        query_starts_S,
        key_starts_S,
        kv_lens_S,
        scale * LOG2_E,
        q_THX.stride(0),
        kv_LY.stride(0),
        latents_LN.stride(0),
        first_seq,
        num_seqs,
        num_tiles,
        H=num_heads,
        P=plain,
        V=v_head_dim,
        C=size,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        BETA=0.0 if scaling is None else scaling.beta,
        LENGTH=1 if scaling is None else scaling.length,
        OFFSET=0 if scaling is None else scaling.offset,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        A_PAD=part,
        B_PAD=max(16, next_power_of_2(max(1, plain - part))),
        HALF_PAD=max(16, next_power_of_2(rotary // 2)),
        V_PAD=max(16, next_power_of_2(v_head_dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit
def _rotate_queries_kernel(
    q_ptr,
    cos_sin_ptr,
    positions_ptr,
    stride_q,
    H: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    H_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions_ptr + token), 0).to(tl.int64)
    head = tl.arange(0, H_PAD)[:, None]
    half = tl.arange(0, HALF_PAD)[None, :]
    there = (head < H) & (half < HALF)
    cos = tl.load(cos_sin_ptr + position * ROTARY + half, mask=half < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + half, mask=half < HALF, other=0.0)
    q_ptr += token * stride_q + head * (P + ROTARY) + P
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF_PAD)[None, :]
        pairs = tl.load(q_ptr + i, mask=(head < H) & (i < ROTARY), other=0.0)  # 16 bytes a thread
        first, second = tl.split(tl.reshape(pairs, (H_PAD, HALF_PAD, 2)))
    else:
        first = tl.load(q_ptr + half, mask=there, other=0.0)
        second = tl.load(q_ptr + HALF + half, mask=there, other=0.0)
    tl.debug_barrier()  # All have read what others overwrite.
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    tl.store(q_ptr + half, (x1 * cos - x2 * sin).to(first.dtype), mask=there)
    tl.store(q_ptr + HALF + half, (x2 * cos + x1 * sin).to(first.dtype), mask=there)


def rotate_queries(
    q_THX: torch.Tensor, cos_sin: torch.Tensor, positions_T: torch.Tensor, interleaved: bool
) -> None:
    """Rotates the last numbers of each query in place, as reference.rotate."""
    num_tokens, num_heads, query_dim = q_THX.shape
    rotary = cos_sin.shape[1]
    assert q_THX.stride()[1:] == (query_dim, 1)
    _rotate_queries_kernel[(num_tokens,)](
        q_THX,
        cos_sin,
        positions_T,
        q_THX.stride(0),
        H=num_heads,
        P=query_dim - rotary,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        H_PAD=next_power_of_2(num_heads),
        HALF_PAD=next_power_of_2(rotary // 2),
        num_warps=4,
    )
