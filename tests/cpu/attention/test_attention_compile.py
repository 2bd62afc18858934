"""The attention kernels compile for sm_80 and sm_90 as their wrappers launch them, fit in shared memory and
keep to their registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
from triton_compile import Compiled, check_kernels

from shoal.attention.backend import AttentionShape
from shoal.attention.step_input import HostView, SharedPrefixes, StepInput
from shoal.attention.triton import TritonBackend
from shoal.kernels.attention.fp8_cache import unpack_blocks
from shoal.kernels.attention.hopper_attention import hopper_prefill_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import StateLayout

FP8 = torch.float8_e4m3fn


def unpack() -> None:
    """The blocks of a large prefill over an fp8 cache."""
    if converts_fp8():
        blocks = torch.zeros(2, dtype=torch.int32)
        layer = LayerCache(cache(8, 16, 128, FP8), scales_2G=torch.ones(2, 8))
        unpack_blocks(layer, blocks, torch.bfloat16)


def converts_fp8() -> bool:
    """Says if the target has instructions for it; without them an engine refuses an fp8 cache."""
    return triton.runtime.driver.active.get_current_target().arch >= 89


def cache(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """One layer's, of two blocks."""
    shape = (2, 2, 2, num_kv_heads, block_size, head_dim)
    num_bytes = 8 * num_kv_heads * block_size * head_dim * dtype.itemsize
    return torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(shape)[:, 1]


def attend(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    window: int | None = None,
    fresh: bool = False,
    fp8: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
    in_chunks: bool = False,
) -> None:
    """One layer of a step of two decodes and one prefill."""
    if fp8 and not converts_fp8():
        return
    backend = TritonBackend(
        AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, softcap),
        block_size,
        8,
        4096,
        torch.device("cpu"),
        dtype,
        fp8_cache=fp8,
    )
    qkv = torch.zeros(34, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = (
        x.unflatten(1, (-1, head_dim))
        for x in qkv.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
    )
    kv_layer = cache(num_kv_heads, block_size, head_dim, FP8 if fp8 else dtype)
    ints = torch.zeros(64, dtype=torch.int32)
    step = StepInput(
        token_ids_T=ints[:34],
        positions_T=ints[:34],
        rows_T=ints[:34],
        rows_S=ints[:3],
        query_starts_S=ints[:4],
        kv_lens_S=ints[:3],
        block_tables=(torch.zeros(4, 48, dtype=torch.int32)[:, 16:],),
        num_decodes=2,
        max_kv_len=4096,
        fresh_prefills=fresh,
        host=HostView((0, 1, 2, 34), (1, 1, 32)),
    )
    scales_2G = torch.ones(2, num_kv_heads) if fp8 else None
    layer = LayerCache(kv_layer, window=window, scales_2G=scales_2G, in_chunks=in_chunks)
    backend.attend(q, k, v, layer, step, sinks_H=torch.zeros(num_heads) if sinks else None)


def cascade(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_seqs: int,
    block_size: int = 16,
    window: int | None = None,
    fp8: bool = False,
    queries: int = 1,
    softcap: float | None = None,
    sinks: bool = False,
    in_chunks: bool = False,
) -> None:
    """One layer of a captured decode step, which looks for shared prefixes, unless it has a window."""
    if fp8 and not converts_fp8():
        return
    backend = TritonBackend(
        AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, softcap),
        block_size,
        num_seqs,
        4096,
        torch.device("cpu"),
        dtype,
        fp8_cache=fp8,
        queries=queries,
    )
    num_tokens = num_seqs * queries
    q = torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)[
        :, : num_heads * head_dim
    ].unflatten(1, (-1, head_dim))
    kv_layer = cache(num_kv_heads, block_size, head_dim, FP8 if fp8 else dtype)
    layout = StateLayout(num_seqs, 20)
    state = torch.zeros(layout.size, dtype=torch.int32)
    ints, token_ints = state[:num_seqs], state[:num_tokens]
    step = StepInput(
        token_ids_T=token_ints,
        positions_T=token_ints,
        rows_T=token_ints,
        rows_S=ints,
        query_starts_S=state[: num_seqs + 1],
        kv_lens_S=ints,
        block_tables=layout.block_tables(state),
        num_decodes=num_seqs,
        max_kv_len=4096,
        queries=queries,
        prefixes=SharedPrefixes(*layout.prefixes(state)),
    )
    scales_2G = torch.ones(2, num_kv_heads) if fp8 else None
    layer = LayerCache(kv_layer, window=window, scales_2G=scales_2G, in_chunks=in_chunks)
    backend.attend(q, q, q, layer, step, sinks_H=torch.zeros(num_heads) if sinks else None)


def hopper(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    sinks: bool = False,
    window: int | None = None,
) -> None:
    """A large prefill, on the one target that the kernel is for."""
    if triton.runtime.driver.active.get_current_target().arch != 90:
        return
    q = torch.zeros(34, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)[
        :, : num_heads * head_dim
    ].unflatten(1, (-1, head_dim))
    kv_layer = torch.zeros(2, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)[:, 1]
    ints = torch.zeros(64, dtype=torch.int32)
    hopper_prefill_attention(
        q,
        kv_layer,
        torch.empty_like(q).contiguous(),
        ints[:8].view(2, 4),
        ints[:1],
        ints[:3],
        torch.zeros(4, 48, dtype=torch.int32)[:, 16:],
        0.1,
        132,
        torch.zeros(num_heads) if sinks else None,
        window,
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAUNCHES: dict[str, Callable[[], None]] = {
    "qwen3-8b": partial(attend, 32, 8, 128, BF16),
    "qwen3-0.6b fresh": partial(attend, 16, 8, 128, BF16, fresh=True),
    "qwen3-8b fp32": partial(attend, 32, 8, 128, FP32),
    "mistral": partial(attend, 32, 8, 128, BF16, window=4096),
    "head size 16, tiny blocks": partial(attend, 4, 4, 16, FP32, 1),
    "head size 80, large blocks": partial(attend, 9, 3, 80, FP16, 256),
    "head size 256": partial(attend, 8, 2, 256, BF16),
    "71 heads on one": partial(attend, 71, 1, 64, BF16),
    "qwen3-8b cascade": partial(cascade, 32, 8, 128, BF16, 256),
    "mistral, a large batch": partial(cascade, 32, 8, 128, BF16, 128, window=4096),
    "qwen3-0.6b cascade of 16": partial(cascade, 16, 8, 128, BF16, 16),
    "fp32 cascade": partial(cascade, 16, 8, 128, FP32, 16),
    "head size 80, cascade": partial(cascade, 9, 3, 80, FP16, 64, 256),
    "head size 256, cascade": partial(cascade, 8, 2, 256, BF16, 64),
    "qwen3-8b on Hopper": partial(hopper, 32, 8, 128, BF16),
    "head size 64 on Hopper, tiny blocks": partial(hopper, 9, 3, 64, FP16, 8),
    "gpt-oss-20b on Hopper": partial(hopper, 64, 8, 64, BF16, sinks=True),
    "head size 128 and sinks on Hopper": partial(hopper, 20, 4, 128, BF16, 48, sinks=True),
    "gpt-oss-20b on Hopper, a window": partial(hopper, 64, 8, 64, BF16, sinks=True, window=128),
    "gemma-3-12b on Hopper": partial(hopper, 16, 8, 256, BF16),
    "gemma-3-12b on Hopper, a window": partial(hopper, 16, 8, 256, BF16, window=1024),
    "head size 256 on Hopper, tiny blocks": partial(hopper, 16, 2, 256, FP16, 8),
    "gemma-4-26b-a4b on Hopper": partial(hopper, 16, 2, 512, BF16),
    "gemma-4-e2b on Hopper, a window": partial(hopper, 8, 1, 512, FP16, window=512),
    "71 heads on one, cascade": partial(cascade, 71, 1, 64, BF16, 16),
    "blocks of an fp8 cache": unpack,
    "qwen3-8b, fp8 cache": partial(attend, 32, 8, 128, BF16, fp8=True),
    "mistral, fp8 cache": partial(attend, 32, 8, 128, BF16, window=4096, fp8=True),
    "head size 80, large blocks, fp8 cache": partial(attend, 9, 3, 80, FP16, 256, fp8=True),
    "qwen3-8b cascade, fp8 cache": partial(cascade, 32, 8, 128, BF16, 256, fp8=True),
    "head size 256, cascade, fp8 cache": partial(cascade, 8, 2, 256, BF16, 64, fp8=True),
    "qwen3-8b cascade, 9 tokens a decode": partial(cascade, 32, 8, 128, BF16, 16, queries=9),
    "mistral, 25 tokens a decode": partial(cascade, 32, 8, 128, BF16, 10, window=4096, queries=25),
    "qwen3-8b fp32, 9 tokens a decode": partial(cascade, 32, 8, 128, FP32, 8, queries=9),
    "gpt-oss-20b": partial(attend, 64, 8, 64, BF16, sinks=True),
    "gpt-oss-20b, a window": partial(attend, 64, 8, 64, BF16, window=128, sinks=True),
    "gpt-oss-20b, fp8 cache": partial(attend, 64, 8, 64, BF16, sinks=True, fp8=True),
    "gpt-oss-20b cascade": partial(cascade, 64, 8, 64, BF16, 64, sinks=True),
    "gpt-oss-20b, a large batch of windows": partial(cascade, 64, 8, 64, BF16, 256, window=128, sinks=True),
    "gemma-2-9b": partial(attend, 16, 8, 256, BF16, softcap=50.0),
    "gemma-2-9b, a window": partial(attend, 16, 8, 256, BF16, window=4096, softcap=50.0),
    "gemma-2-9b fp32": partial(attend, 16, 8, 256, FP32, softcap=50.0),
    "gemma-2-9b cascade": partial(cascade, 16, 8, 256, BF16, 64, softcap=50.0),
    "gemma-3-12b fresh": partial(attend, 16, 8, 256, BF16, fresh=True),
    "gemma-3-12b, a window": partial(attend, 16, 8, 256, BF16, window=1024, fresh=True),
    "gemma-3-12b, fp8 cache": partial(attend, 16, 8, 256, BF16, fp8=True),
    "gemma-3-12b, a window, fp8 cache": partial(attend, 16, 8, 256, BF16, window=1024, fp8=True),
    "gemma-4-26b-a4b": partial(attend, 16, 2, 512, BF16),
    "gemma-4-26b-a4b fresh": partial(attend, 16, 2, 512, BF16, 8, fresh=True),
    "gemma-4-26b-a4b fp32": partial(attend, 16, 2, 512, FP32),
    "gemma-4-26b-a4b, fp8 cache": partial(attend, 16, 2, 512, BF16, fp8=True),
    "gemma-4-26b-a4b cascade": partial(cascade, 16, 2, 512, BF16, 64),
    "gemma-4-26b-a4b cascade, fp8 cache": partial(cascade, 16, 2, 512, BF16, 64, fp8=True),
    "gemma-4-e2b": partial(attend, 8, 1, 512, BF16),
    "head size 192": partial(attend, 16, 4, 192, BF16, window=512),
    "head size 96": partial(attend, 32, 8, 96, BF16, sinks=True),
    "llama-4-scout, chunks": partial(attend, 40, 8, 128, BF16, window=8192, in_chunks=True),
    "llama-4-scout, 25 tokens a decode": partial(
        cascade, 40, 8, 128, BF16, 10, window=8192, queries=25, in_chunks=True
    ),
    "qwen3-8b cascade, fp8 cache, 25 tokens a decode": partial(
        cascade, 32, 8, 128, BF16, 10, fp8=True, queries=25
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_and_fits(compiled: dict[str, list[Compiled]], case: str) -> None:
    # constants of a window or of a group outside the loops over keys, and at most a few in them
    check_kernels(compiled[case], max_spilled=192)
    kernels = [k for k in compiled[case] if k.name in ("decode_kernel", "prefill_kernel")]
    assert all(k.spills_in_loops <= 3 for k in kernels)


@pytest.mark.slow
def test_three_decode_programs_fit_on_an_sm(compiled: dict[str, list[Compiled]]) -> None:
    for kernel in [*compiled["qwen3-8b"], *compiled["qwen3-8b cascade"], *compiled["qwen3-8b, fp8 cache"]]:
        if kernel.name == "decode_kernel" and kernel.capability == 90:
            assert (
                3 * (kernel.shared + 1024) <= 228 * 1024
                and 3 * kernel.num_warps * 32 * kernel.registers <= 65536
            )
