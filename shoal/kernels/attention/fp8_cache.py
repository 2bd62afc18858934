"""Blocks of an fp8 cache as plain numbers, one after the other, for an attention kernel that reads plain ones
alone (hopper_attention.py). Shapes: B blocks, G kv heads, N head size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.attention.paged_attention import cache_bytes
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.rounding import next_power_of_2


@triton.jit
def _unpack_kernel(
    kv_ptr,
    scales_ptr,
    blocks_ptr,
    out_ptr,
    stride_block,
    stride_kv,
    stride_head,
    G: tl.constexpr,
    ITEMS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A program works on the keys or the values of one head in one block."""
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    items = tl.arange(0, PADDED)
    source = tl.load(blocks_ptr + block).to(tl.int64) * stride_block
    source += part // G * stride_kv + part % G * stride_head
    packed = tl.load(kv_ptr + source + items, mask=items < ITEMS, other=0)
    numbers = packed.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scales_ptr + part)
    target = (block * (2 * G) + part) * ITEMS
    tl.store(out_ptr + target + items, numbers.to(out_ptr.dtype.element_ty), mask=items < ITEMS)


def unpack_blocks(cache: LayerCache, blocks_B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, 2, G, block_size, N]: these blocks of an fp8 cache, in this order, as numbers of `dtype`."""
    kv_layer, scales_2G = cache.blocks, cache.scales_2G
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    assert scales_2G is not None and scales_2G.is_contiguous() and kv_layer.stride()[3:] == (head_dim, 1)
    out = torch.empty(len(blocks_B), *kv_layer.shape[1:], dtype=dtype, device=kv_layer.device)
    _unpack_kernel[(len(blocks_B), 2 * num_kv_heads)](
        cache_bytes(cache),
        scales_2G,
        blocks_B,
        out,
        *kv_layer.stride()[:3],
        G=num_kv_heads,
        ITEMS=block_size * head_dim,
        PADDED=next_power_of_2(block_size * head_dim),
    )
    return out
