"""One Triton kernel between the q/k/v matmul and attention. It does q/k norm and rotary embedding, and
writes k and v into the paged cache.

Because this is one kernel, a head's numbers pass once through the registers instead of four times through
memory. A program works on a few heads of one token, as both numbers of the pairs [heads, N/2] that rotation
turns. Inputs that do not come from the matmul (the token's position, its slot, its angles)
are read while the matmul still runs (pdl.py).

T tokens · H query heads · G kv heads · N head size · R state rows · M blocks of a sequence. The oracle is
reference.py. D of a head's N numbers are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.attention import QueryScaling

ONE_WAVE = 1024  # The programs of as many tokens are about as many as run at once.


@triton.jit
def _pairs(i, N: tl.constexpr, D: tl.constexpr):
    """Returns the places in a head of both numbers of pair i. The first D numbers are pairs (i, i + D/2) that
    turn; the rest is paired in the same way, and does not turn."""
    if (D == N) | (D == 0):
        first = i
        second = i + N // 2
    else:
        first = i + tl.where(i < D // 2, 0, D // 2)
        second = i + tl.where(i < D // 2, D // 2, N // 2)
    return first, second


@triton.jit
def _weight(q_weight_ptr, k_weight_ptr, is_q, i, mask, G: tl.constexpr):
    weight = tl.load(q_weight_ptr + i, mask=mask, other=0.0)
    if G > 0:
        weight = tl.where(is_q, weight, tl.load(k_weight_ptr + i, mask=mask, other=0.0))
    return weight.to(tl.float32)


@triton.jit
def _load_pairs(ptr, first, second, mask):
    return tl.load(ptr + first, mask=mask, other=0.0), tl.load(ptr + second, mask=mask, other=0.0)


@triton.jit
def _to_e4m3(x):
    """The bits of x in e4m3, as reference.to_fp8 rounds. This is arithmetic of integers, because Triton's own
    conversion does not saturate everywhere, and rounds wrongly in the interpreter."""
    size = tl.minimum(tl.abs(x), 448.0)
    # The last bit of 2^14 in float32 is worth e4m3's smallest number, 2^-9. Smaller numbers than 2^-6 are
    # multiples of it.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, tiny, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    rows_ptr,
    tables_ptr,
    kv_ptr,
    scales_ptr,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    BETA: tl.constexpr,
    LENGTH: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    KEEP_K: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF)[None, :]
    in_half = i < N // 2
    mask = (head < H + 2 * G) & in_half
    at_first, at_second = _pairs(i, N, D)
    head_ptr = qkv_ptr + token * (H + 2 * G) * N + head * N
    if not ONE_WAVE:  # Most programs have nothing to wait for, so they load everything at once.
        wait_for_previous(PDL)
        first, second = _load_pairs(head_ptr, at_first, at_second, mask)
    position = tl.load(positions_ptr + token, cache_modifier=".cg")
    row = tl.load(rows_ptr + token, cache_modifier=".cg").to(tl.int64)
    is_token = (position >= 0) & (row >= 0)
    if D > 0:
        angle_ptr = cos_sin_ptr + position.to(tl.int64) * D + i
        turns = (i < D // 2) & is_token
        cos = tl.load(angle_ptr, mask=turns, other=1.0)
        sin = tl.load(angle_ptr + D // 2, mask=turns, other=0.0)
    if G > 0:
        block = tl.load(
            tables_ptr + row * table_stride + position // BLOCK_SIZE,
            mask=is_token,
            other=0,
            cache_modifier=".cg",
        ).to(tl.int64)
    if HAS_NORM:
        weight1 = _weight(q_weight_ptr, k_weight_ptr, head < H, at_first, in_half, G)
        weight2 = _weight(q_weight_ptr, k_weight_ptr, head < H, at_second, in_half, G)
    is_v = head >= H + G
    stored = mask & (head >= H)
    if FP8:
        cache_scale = tl.load(scales_ptr + head - H, mask=(head >= H) & (head < H + 2 * G), other=1.0)
    if ONE_WAVE:
        wait_for_previous(PDL)
        first, second = _load_pairs(head_ptr, at_first, at_second, mask)
    if not is_token:
        return

    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    v1, v2 = first, second
    if HAS_NORM or V_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / N + eps)[:, None]
    if V_NORM:
        v1, v2 = (x1 * scale).to(first.dtype), (x2 * scale).to(first.dtype)
    if HAS_NORM:
        WEIGHT: tl.constexpr = q_weight_ptr.dtype.element_ty
        x1 = ((x1 * scale).to(WEIGHT).to(tl.float32) * weight1).to(first.dtype).to(tl.float32)
        x2 = ((x2 * scale).to(WEIGHT).to(tl.float32) * weight2).to(first.dtype).to(tl.float32)
    if D > 0:
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if BETA != 0:
        steps = ((position + OFFSET) // LENGTH).to(tl.float32)
        factors = tl.where(head < H, 1.0 + BETA * tl.log(1.0 + steps), 1.0)
        x1 *= factors
        x2 *= factors
    first = tl.where(is_v, v1, x1.to(first.dtype))
    second = tl.where(is_v, v2, x2.to(second.dtype))

    changed = H
    if KEEP_K:
        changed = H + 2 * G if V_NORM else H + G
    tl.store(head_ptr + at_first, first, mask=mask & (head < changed))
    tl.store(head_ptr + at_second, second, mask=mask & (head < changed))
    if G > 0:
        kv_head = tl.where(is_v, head - H - G, head - H)
        slot_ptr = (
            kv_ptr
            + block * block_stride
            + is_v * kv_stride
            + kv_head * head_stride
            + (position % BLOCK_SIZE) * N
        )
        if FP8:
            first = _to_e4m3(tl.div_rn(first.to(tl.float32), cache_scale))
            second = _to_e4m3(tl.div_rn(second.to(tl.float32), cache_scale))
        tl.store(slot_ptr + at_first, first, mask=stored)
        tl.store(slot_ptr + at_second, second, mask=stored)


def qk_norm_rope_store(
    qkv_TX: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    block_tables_RM: torch.Tensor,
    cache: LayerCache,
    keep_k: bool = True,
    *,
    stores: bool = True,
    v_norm: bool = False,
    query_scaling: QueryScaling | None = None,
) -> None:
    """As reference.qk_norm_rope_store. Padding tokens are left alone. Without `keep_k`, k of many tokens is
    not written back, which saves time (benchmarks/results/kernels.md)."""
    kv_layer, scales_2G = cache.blocks, cache.scales_2G
    num_tokens, (_, _, num_kv_heads, block_size, head_dim) = qkv_TX.shape[0], kv_layer.shape
    num_kv_heads *= stores
    num_heads = qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv_TX.is_contiguous() and num_heads > 0 and head_dim % 2 == 0
    assert (
        (not stores or (q_weight is None) == (k_weight is None))
        and kv_layer.stride(3) == head_dim
        and kv_layer.stride(4) == 1
    )
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    assert rotary_dim <= head_dim and rotary_dim % 2 == 0
    fp8 = scales_2G is not None
    assert fp8 == (kv_layer.dtype == torch.float8_e4m3fn)
    all_heads = num_heads + 2 * num_kv_heads
    half = next_power_of_2(head_dim // 2)
    heads = heads_per_program(num_tokens, all_heads, head_dim)
    _qk_norm_rope_store_kernel[(num_tokens, cdiv(all_heads, heads))](
        qkv_TX,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        positions_T,
        rows_T,
        block_tables_RM,
        kv_layer.view(torch.uint8) if fp8 else kv_layer,
        scales_2G if fp8 else rows_T,  # it is not read there
        block_tables_RM.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        H=num_heads,
        G=num_kv_heads,
        N=head_dim,
        D=rotary_dim,
        HAS_NORM=q_weight is not None,
        V_NORM=v_norm and stores,
        BETA=0.0 if query_scaling is None else query_scaling.beta,
        LENGTH=1 if query_scaling is None else query_scaling.length,
        OFFSET=0 if query_scaling is None else query_scaling.offset,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HALF=half,
        ONE_WAVE=num_tokens <= ONE_WAVE,
        KEEP_K=keep_k or num_tokens <= ONE_WAVE,  # Few tokens have no variant of their own.
        FP8=fp8,
        num_warps=max(1, min(heads * half // (256 if num_tokens <= ONE_WAVE else 512), 8)),
        **pdl_options(),
    )


def heads_per_program(num_tokens: int, all_heads: int, head_dim: int) -> int:
    """Few tokens get programs of few heads, so that they spread over the GPU. Others get programs of many
    heads, which share the loads of cos and sin, unless heads are large or too many of a program's heads would
    be masked (benchmarks/results/kernels.md)."""
    if num_tokens <= 64 or head_dim >= 256:
        return min(next_power_of_2(all_heads), 4)
    return 32 if all_heads % 32 == 0 else min(next_power_of_2(all_heads), 16)
