"""An fp8 KV cache on a GPU: what is written, every attention over it at real sizes, captured or not, and the
engine around them. Attention's oracle is attention_reference over the same numbers in fp32; its tolerances are
those over a plain cache (test_attention_gpu.py), as an fp8 number is exact in bf16 and fp16."""

from __future__ import annotations

import random

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.attention.triton import TritonBackend
from shoal.kernels import reference
from shoal.kernels.attention.reference import paged_attention
from shoal.kernels.layer_cache import LayerCache
from tests import tiny
from tests.gpu.test_attention_gpu import BF16, DEVICE, FP16, FP32, Case, decodes, set_groups

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that converts fp8",
    ),
]
FP8 = torch.float8_e4m3fn
PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 16, 17, 64, 100, 150))]


class Fp8Case(Case):
    """The same step over fp8 numbers, with scales of each head's own. Unused slots hold NaN, and so does what
    is passed of this step's k and v, as they must be read from the cache."""

    def __init__(
        self, sequences, num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, **options
    ) -> None:
        super().__init__(sequences, num_heads, num_kv_heads, head_dim, block_size, **options)
        self.scales_2G = torch.rand(2, num_kv_heads, device=DEVICE) + 0.1
        fp8 = reference.to_fp8(self.kv_layer, self.scales_2G[:, :, None, None])
        cache = torch.full((len(fp8), 2, *fp8.shape[1:]), 0x7F, dtype=torch.uint8, device=DEVICE)
        cache[:, 1] = fp8.view(torch.uint8)
        self.kv_layer = cache.view(FP8)[:, 1]
        self.k.fill_(float("nan"))
        self.v.fill_(float("nan"))
        self.backend = TritonBackend(
            self.heads,
            block_size,
            len(sequences),
            self.max_kv_len,
            DEVICE,
            self.dtype,
            fp8_cache=True,
            queries=self.step.queries,
        )

    def expected(self, window: int | None = None) -> torch.Tensor:
        step = self.step
        return paged_attention(
            self.q,
            self.kv_layer.float() * self.scales_2G[:, :, None, None],
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            step.block_tables[0],
            self.backend.scale,
            window,
        )


# What is written


@pytest.mark.parametrize("tokens", [3, 70, 3000])
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_numbers_are_rounded_to_nearest_even_and_do_not_overflow(
    tokens: int, scale: float, dtype: torch.dtype
) -> None:
    from shoal.kernels import triton_ops

    heads, kv_heads, head_dim = 32, 8, 128
    every = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(FP8).float()
    edges = torch.cat(
        (every, (every[1:] + every[:-1]) / 2, every.new_tensor([448.5, 464, 480, 1e30, 2**-10]))
    )
    edges = torch.cat((edges, -edges)) * scale
    numbers = edges[torch.randint(len(edges), (tokens, 2 * kv_heads * head_dim), device=DEVICE)].to(dtype)
    qkv = torch.cat((torch.randn(tokens, heads * head_dim, device=DEVICE).to(dtype), numbers), dim=1)
    blocks = -(-tokens // 16)
    tables = torch.randperm(blocks, dtype=torch.int32, device=DEVICE).view(1, -1)
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    cos_sin = torch.cat((torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2)), dim=1)
    scales = torch.full((2, kv_heads), scale, device=DEVICE)
    caches = []
    for ops in (reference, triton_ops):
        kv = torch.full((blocks, 2, 2, kv_heads, 16, head_dim), 0x55, dtype=torch.uint8, device=DEVICE).view(
            FP8
        )
        ops.qk_norm_rope_store(
            qkv.clone(),
            None,
            None,
            1e-6,
            cos_sin.to(DEVICE),
            positions,
            rows,
            tables,
            LayerCache(kv[:, 1], scales_2G=scales),
        )
        assert (kv.view(torch.uint8)[:, 0] == 0x55).all(), "another layer's cache was touched"
        caches.append(kv.float())
    assert torch.equal(*caches)


# Attention


@pytest.mark.parametrize("queries", [2, 8, 25])
@pytest.mark.parametrize("heads", [(8, 8, 128), (16, 8, 128), (32, 8, 128), (64, 8, 64)], ids=str)
def test_decodes_of_several_tokens(heads: tuple[int, int, int], queries: int) -> None:
    lengths = [3000, 0, 9, 64, 40, 1025, 1030, 1040, 1050, 1060]
    case = Fp8Case(decodes(lengths, queries), *heads, num_decodes=len(lengths), queries=queries)
    for window in (None, 5, 700):
        case.check(case.attend(window), window)
    set_groups(case, [([6, 8, 7], 992)])
    case.check(case.attend())


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (32, 32, 96), (8, 1, 80), (8, 2, 256)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_any_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    sequences = [*decodes([1, 15, 16, 17, 1000, 0, 2049, 63, 64, 65]), (40, 100), (300, 300)]
    case = Fp8Case(sequences, *heads, dtype=dtype, num_decodes=10)
    case.check(case.attend())


@pytest.mark.parametrize("lengths", [[1024], [32768], [131072, 1], [4096] * 32, [1024] * 256], ids=len)
def test_decode_at_the_sizes_that_are_measured(lengths: list[int]) -> None:
    case = Fp8Case(decodes(lengths), num_decodes=len(lengths))
    case.check(case.attend())


@pytest.mark.parametrize("window", [None, 4096])
def test_a_large_batch_with_some_long_contexts(window: int | None) -> None:
    lengths = [9000, 7000, 2000] + [300] * 120
    case = Fp8Case(decodes(lengths), num_decodes=len(lengths))
    case.check(case.attend(window), window)


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_any_block_size(block_size: int) -> None:
    sequences = [*decodes([1, 255, 256, 257, 700]), (40, 100), (300, 300)]
    case = Fp8Case(sequences, block_size=block_size, num_decodes=5)
    case.check(case.attend())


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_windows(window: int) -> None:
    case = Fp8Case([*decodes([1, 5000, 99, 0]), (700, 700), (150, 6000)], num_decodes=4)
    case.check(case.attend(window), window)


@pytest.mark.parametrize(
    "sequences",
    [
        [(2048, 2048)],
        [(1500, 1500), (513, 4000)],
        [(16, 9000)],
        [(50, 6000)] * 3,
        [(1, 1), (1, 500), (9000, 9000)],
    ],
    ids=str,
)
def test_prefills_large_and_short_after_a_prefix(sequences: list[tuple[int, int]]) -> None:
    case = Fp8Case(sequences)
    case.check(case.attend())


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("shared", [2048, 2000, 16])
def test_one_prefix_of_a_whole_batch(heads: int, shared: int) -> None:
    case = Fp8Case(decodes([2176 + i % 64 for i in range(256)]), heads, num_decodes=256, max_kv_len=4608)
    set_groups(case, [(list(range(256)), shared)])
    case.check(case.attend())


def test_the_same_bits_every_time_from_a_captured_step_too() -> None:
    case = Fp8Case(decodes([9000, 8000, 3000, 500, 2000, 1, 17, 1280] * 3), num_decodes=24, max_kv_len=40_960)
    set_groups(case, [([0, 1, 8, 9, 16], 7984), ([4, 12, 20], 16)])
    first = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [case.backend.attend(case.q, case.k, case.v, case.cache(), case.step) for _ in range(3)]
    for _ in range(100):
        for layer in layers:
            layer.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(layer, first) for layer in layers)
    case.check(first)
    assert not case.backend.workspace.arrived.any()


# The engine


@pytest.fixture
def engine_options():
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_seqs": 16,
        "kv_cache_dtype": "fp8",
    }


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("name", ["qwen3", "llama-one-kv-head", "mistral-window", "qwen3-moe", "olmo2"])
def test_log_probabilities_are_those_of_the_cpu(name, root, build) -> None:
    """Sums in another order may round a number to its neighbour, so these are not the same bits."""
    folder = tiny.write_model(root, name)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_dtype": "fp8"}
    with LLM(str(folder), device="cpu", **options) as cpu:
        want = cpu.generate(PROMPTS[4:], params)
    for options in ({}, {"max_num_batched_tokens": 40}):
        got = build(name, **options).generate(PROMPTS[4:], params)
        for prompt, one, other in zip(PROMPTS[4:], got, want):
            pairs = zip(prompt[1:], one.prompt_logprobs[1:], other.prompt_logprobs[1:])
            off = torch.tensor([abs(a[token].logprob - b[token].logprob) for token, a, b in pairs])
            assert off.mean() < 1e-2 and off.max() < 0.3, (off.mean(), off.max())


@pytest.mark.parametrize(
    "options",
    [
        dict(enforce_eager=True),
        dict(async_scheduling=False),
        dict(max_num_batched_tokens=40),
        dict(enable_prefix_caching=False),
        dict(num_gpu_blocks_override=14, max_model_len=200),
        dict(block_size=64),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_runs(options, build) -> None:
    expected = ids_of(build().generate(PROMPTS, greedy()))
    engine = build(**options)
    for _ in range(2):  # the second time from the prefix cache
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected


def test_twice_as_many_blocks_fit_as_of_bf16(build) -> None:
    plain, fp8 = (build(dtype="bfloat16", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    assert fp8.stats().num_blocks // 2 == plain.stats().num_blocks
    assert ids_of(fp8.generate(PROMPTS, greedy()))


def test_blocks_come_back_from_host_memory_and_disk_as_they_were(build, tmp_path) -> None:
    prompts = [random.Random(i).choices(range(256), k=200) for i in range(10)]
    options = dict(num_gpu_blocks_override=20, kv_load_policy="always")
    disk = dict(kv_disk_path=str(tmp_path), kv_disk_bytes=1 << 30)
    expected = ids_of(build().generate(prompts, greedy()))
    for tiers in (dict(kv_host_bytes=64 << 20), disk):
        llm = build(**options, **tiers)
        for round_ in range(2):
            outputs = [llm.generate([prompt], greedy())[0] for prompt in prompts]
            assert ids_of(outputs) == expected
            assert not round_ or [o.num_cached_tokens for o in outputs].count(192) >= 9


def test_it_sleeps_and_wakes(build) -> None:
    llm = build(enable_sleep_mode=True)
    expected = ids_of(llm.generate(PROMPTS, greedy()))
    llm.sleep(level=1)
    llm.wake_up()
    assert ids_of(llm.generate(PROMPTS, greedy())) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_the_tokens_of_one(build) -> None:
    expected = ids_of(build().generate(PROMPTS, greedy()))
    assert ids_of(build(tensor_parallel_size=2).generate(PROMPTS, greedy())) == expected
