"""One Triton kernel between the q/k/v matmul and attention. It does q/k norm and rotary embedding, and
writes k and v into the paged cache.

Because this is one kernel, a head's numbers pass once through the registers instead of four times through
memory. A program works on a few heads of one token, as two halves [heads, N/2], because rotation pairs
element i with i + N/2. Inputs that do not come from the matmul (the token's position, its slot, its angles)
are read while the matmul still runs (pdl.py).

T tokens · H query heads · G kv heads · N head size · R state rows · M blocks of a sequence. The oracle is
reference.py.
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
def _weight(q_weight_ptr, k_weight_ptr, is_q, i, mask):
    return tl.where(
        is_q, tl.load(q_weight_ptr + i, mask=mask, other=0.0), tl.load(k_weight_ptr + i, mask=mask, other=0.0)
    ).to(tl.float32)


@triton.jit
def _halves(ptr, mask, N: tl.constexpr):
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + N // 2, mask=mask, other=0.0)


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
    HAS_NORM: tl.constexpr,
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
    first_ptr = qkv_ptr + token * (H + 2 * G) * N + head * N + i
    if not ONE_WAVE:  # Most programs have nothing to wait for, so they load everything at once.
        wait_for_previous(PDL)
        first, second = _halves(first_ptr, mask, N)
    position = tl.load(positions_ptr + token, cache_modifier=".cg")
    row = tl.load(rows_ptr + token, cache_modifier=".cg").to(tl.int64)
    is_token = (position >= 0) & (row >= 0)
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * N + i
    cos = tl.load(angle_ptr, mask=in_half & is_token, other=0.0)
    sin = tl.load(angle_ptr + N // 2, mask=in_half & is_token, other=0.0)
    block = tl.load(
        tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=is_token, other=0, cache_modifier=".cg"
    ).to(tl.int64)
    if HAS_NORM:
        weight1 = _weight(q_weight_ptr, k_weight_ptr, head < H, i, in_half)
        weight2 = _weight(q_weight_ptr + N // 2, k_weight_ptr + N // 2, head < H, i, in_half)
    is_v = head >= H + G
    stored = mask & (head >= H)
    if FP8:
        cache_scale = tl.load(scales_ptr + head - H, mask=(head >= H) & (head < H + 2 * G), other=1.0)
    if ONE_WAVE:
        wait_for_previous(PDL)
        first, second = _halves(first_ptr, mask, N)
    if not is_token:
        return

    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / N + eps)[:, None]
        x1 = (
            ((x1 * scale).to(q_weight_ptr.dtype.element_ty).to(tl.float32) * weight1)
            .to(first.dtype)
            .to(tl.float32)
        )
        x2 = (
            ((x2 * scale).to(q_weight_ptr.dtype.element_ty).to(tl.float32) * weight2)
            .to(first.dtype)
            .to(tl.float32)
        )
    first = tl.where(is_v, first, (x1 * cos - x2 * sin).to(first.dtype))
    second = tl.where(is_v, second, (x2 * cos + x1 * sin).to(first.dtype))

    rotated = mask & (head < (H + G if KEEP_K else H))
    tl.store(first_ptr, first, mask=rotated)
    tl.store(first_ptr + N // 2, second, mask=rotated)
    kv_head = tl.where(is_v, head - H - G, head - H)
    slot_ptr = (
        kv_ptr
        + block * block_stride
        + is_v * kv_stride
        + kv_head * head_stride
        + (position % BLOCK_SIZE) * N
        + i
    )
    if FP8:
        first = _to_e4m3(tl.div_rn(first.to(tl.float32), cache_scale))
        second = _to_e4m3(tl.div_rn(second.to(tl.float32), cache_scale))
    tl.store(slot_ptr, first, mask=stored)
    tl.store(slot_ptr + N // 2, second, mask=stored)


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
    num_heads = qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
    assert stores and not v_norm and query_scaling is None and cos_sin is not None
    assert qkv_TX.is_contiguous() and num_heads > 0 and cos_sin.shape[1] == head_dim
    assert (
        (q_weight is None) == (k_weight is None)
        and kv_layer.stride(3) == head_dim
        and kv_layer.stride(4) == 1
    )
    fp8 = scales_2G is not None
    assert fp8 == (kv_layer.dtype == torch.float8_e4m3fn)
    all_heads = num_heads + 2 * num_kv_heads
    half = next_power_of_2(head_dim // 2)
    heads = heads_per_program(num_tokens, all_heads)
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
        scales_2G if fp8 else cos_sin,  # nobody looks at cos_sin there
        block_tables_RM.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        H=num_heads,
        G=num_kv_heads,
        N=head_dim,
        HAS_NORM=q_weight is not None,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HALF=half,
        ONE_WAVE=num_tokens <= ONE_WAVE,
        KEEP_K=keep_k or num_tokens <= ONE_WAVE,  # Few tokens have no variant of their own.
        FP8=fp8,
        num_warps=max(1, min(heads * half // (256 if num_tokens <= ONE_WAVE else 512), 8)),
        **pdl_options(),
    )


def heads_per_program(num_tokens: int, all_heads: int) -> int:
    """Few tokens get programs of few heads, so that they spread over the GPU. Others get programs of many
    heads, which share the loads of cos and sin, unless too many of a program's heads would be masked
    (benchmarks/results/kernels.md)."""
    if num_tokens <= 64:
        return min(next_power_of_2(all_heads), 4)
    return 32 if all_heads % 32 == 0 else min(next_power_of_2(all_heads), 16)
