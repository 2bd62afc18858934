"""The attention kernels compile for sm_80 and sm_90 as their wrappers launch them, fit in shared memory and keep to their registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from triton_compile import Compiled, check_kernels, compile_launches

from shoal.attention.step import StepInput
from shoal.attention.triton import TritonBackend


def attend(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16, window: int | None = None,
           fresh: bool = False) -> None:
    """One layer of a step of two decodes and one prefill."""
    backend = TritonBackend(num_heads, num_kv_heads, head_dim, block_size, 8, 4096, torch.device("cpu"), dtype)
    qkv = torch.zeros(34, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in qkv.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1))
    kv_layer = torch.zeros(2, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)[:, 1]
    ints = torch.zeros(64, dtype=torch.int32)
    step = StepInput(ints[:34], ints[:34], ints[:34], ints[:3], ints[:4], ints[:3], torch.zeros(4, 48, dtype=torch.int32)[:, 16:],
                     num_decodes=2, max_query_len=32, max_kv_len=4096, fresh_prefills=fresh)
    backend.attend(q, k, v, kv_layer, step, window)


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
}
compiled = pytest.fixture(scope="module")(lambda: compile_launches(__file__))


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles_and_fits(compiled: dict[str, list[Compiled]], case: str) -> None:
    check_kernels(compiled[case], max_spilled=64)    # some constants of a window outside the loops; the loops have none


def test_three_decode_programs_fit_on_an_sm(compiled: dict[str, list[Compiled]]) -> None:
    for kernel in compiled["qwen3-8b"]:
        if kernel.name == "decode_kernel" and kernel.capability == 90:
            assert 3 * (kernel.shared + 1024) <= 228 * 1024 and 3 * kernel.num_warps * 32 * kernel.registers <= 65536
