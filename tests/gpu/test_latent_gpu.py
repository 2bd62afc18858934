"""Latent attention on a GPU: its kernels at published sizes against the reference, and engines that give the
oracle's tokens with graphs and without.

bf16: queries, weights and sums of latents are rounded to 8 bits once each, relative to results of about 1:
3e-2. fp32: sums are reordered: 1e-3, as results are sums of thousands of terms.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.attention.latent_cpu import TorchLatentBackend
from shoal.attention.latent_triton import TritonLatentBackend
from shoal.attention.step_input import HostView, StepInput
from shoal.kernels.hopper import is_hopper
from shoal.kernels.latent import reference, store
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.attention import QueryScaling
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig
from tests import tiny
from tests.tiny_families import write_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-3}
GLM_FLASH = LatentKind(20, 768, 512, 192, 64, 256, scale=256**-0.5, rope=RopeConfig())
V2_LITE = LatentKind(16, None, 512, 128, 64, 128, scale=192**-0.5, rope=RopeConfig())
KINDS = {
    "glm-4.7-flash": GLM_FLASH,
    "glm-4.7-flash on two ranks": replace(GLM_FLASH, num_heads=10),
    "deepseek-v2-lite": V2_LITE,
    "deepseek-v3": replace(V2_LITE, num_heads=128, q_lora_rank=1536),
    "mistral-small-4": LatentKind(
        32, 1024, 256, 64, 64, 128, 128**-0.5, RopeConfig(), query_scaling=QueryScaling(0.1, 1024)
    ),
}
# (decodes by kv_len; prefills by kv_len and tokens)
STEPS = {
    "one long decode": ([9000], []),
    "decodes": ([1, 17, 64, 500, 0, 3000, 129], []),
    "many decodes": ([*range(1, 600, 3)], []),
    "fresh prefills": ([], [(1000, 1000), (3, 3), (129, 129)]),
    "a long chunk after a prefix": ([], [(3000, 1500)]),
    "short chunks after prefixes": ([], [(5000, 4), (700, 30)]),
    "decodes beside prefills": ([900, 33], [(400, 400), (50, 50)]),
    "decodes beside chunks": ([900, 33], [(4000, 20), (50, 50)]),
}


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_step(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    block_size: int,
    queries: int = 1,
    captured: bool = False,
) -> StepInput:
    """A decode of length 0 is an empty place."""
    kv_lens = [*decodes, *(kv_len for kv_len, _ in prefills)]
    counts = [queries] * len(decodes) + [tokens for _, tokens in prefills]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = [s if kv_len else -1 for s, kv_len in enumerate(kv_lens)]
    blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = torch.zeros(len(kv_lens), max(blocks), dtype=torch.int32)
    order = random.Random(0).sample(range(sum(blocks)), sum(blocks))
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    positions = [
        position if kv_len else -1
        for kv_len, count in zip(kv_lens, counts)
        for position in range(kv_len - count, kv_len)
    ]
    return StepInput(
        token_ids_T=ints([0] * starts[-1]),
        positions_T=ints(positions),
        rows_T=ints([row for row, count in zip(rows, counts) for _ in range(count)]),
        rows_S=ints(rows),
        query_starts_S=ints(starts),
        kv_lens_S=ints(kv_lens),
        block_tables=(tables.to(DEVICE),),
        num_decodes=len(decodes),
        max_kv_len=max(kv_lens),
        queries=queries,
        fresh_prefills=bool(prefills) and all(kv_len == tokens for kv_len, tokens in prefills),
        sparse_decodes=captured,
        host=None if captured or not prefills else HostView(tuple(starts), tuple(kv_lens)),
    )


def make_layer(
    kind: LatentKind, step: StepInput, dtype: torch.dtype, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, LayerCache]:
    """Queries, the step's latents, the heads' matrices, angles, and a cache that holds the latents."""
    print("seed", torch.manual_seed(0).initial_seed())
    num_blocks = int(step.block_tables[0].max()) + 1
    blocks = torch.randn(num_blocks, 2, 1, 1, block_size, kind.head_dim, device=DEVICE).to(dtype)
    cache = LayerCache(blocks[:, 1])
    width = kind.qk_nope_head_dim + kind.v_head_dim
    kv_b = torch.randn(kind.num_heads, width, kind.kv_lora_rank, device=DEVICE) / kind.kv_lora_rank**0.5
    angles = torch.outer(torch.arange(10000.0), torch.rand(kind.rotary_dim // 2)).to(DEVICE)
    a_TY = torch.randn(step.num_tokens, kind.head_dim, device=DEVICE).to(dtype)
    weight = torch.ones(kind.kv_lora_rank, dtype=dtype, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    where = step.positions_T, step.rows_T, step.block_tables[0], cache, kind.interleaved
    _, latent_TN = store.norm_rope_store(a_TY, None, weight, 1e-6, cos_sin, *where)
    copy = LayerCache(cache.blocks.float())
    _, expected = reference.norm_rope_store(
        a_TY.float(), None, weight.float(), 1e-6, cos_sin, *where[:3], copy, kind.interleaved
    )
    for found, exact in ((latent_TN.float(), expected), (cache.blocks.float(), copy.blocks)):
        torch.testing.assert_close(found, exact, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    q_THX = torch.randn(step.num_tokens, kind.num_heads, kind.query_dim, device=DEVICE).to(dtype)
    return q_THX, latent_TN, kv_b.to(dtype), cos_sin, cache


def expected_of(kind: LatentKind, step: StepInput, *arguments) -> torch.Tensor:
    """The reference in float32, of the same numbers."""
    q_THX, latent_TN, kv_b, cos_sin, cache = arguments
    exact = LayerCache(cache.blocks.float())
    return TorchLatentBackend(kind).attend(
        q_THX.float(), latent_TN.float(), kv_b.float(), cos_sin, exact, step
    )


def build(kind: LatentKind, dtype: torch.dtype) -> TritonLatentBackend:
    return TritonLatentBackend(kind, DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_published_sizes(kind, name, dtype):
    kind, step = KINDS[kind], make_step(*STEPS[name], 16)
    arguments, backend = make_layer(kind, step, dtype, 16), build(kind, dtype)
    backend.begin(step)
    found = backend.attend(*arguments, step)
    expected = expected_of(kind, step, *arguments)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert not backend.workspace.arrived.any()


@pytest.mark.parametrize(
    ("decodes", "prefills"),
    [([], [(2500, 2500), (3, 3), (1700, 1700)]), ([900, 33], [(3000, 2500), (1801, 1700)])],
    ids=["fresh", "after prefixes, beside decodes"],
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_long_prefills_go_to_hoppers_kernel(decodes, prefills, interleaved):
    kind, step = replace(GLM_FLASH, interleaved=interleaved), make_step(decodes, prefills, 16)
    arguments, backend = make_layer(kind, step, torch.bfloat16, 16), build(kind, torch.bfloat16)
    expected = expected_of(kind, step, *arguments)
    backend.begin(step)
    assert (backend.prefill.work is not None) == is_hopper(DEVICE)
    for _ in range(2):  # The counter of tiles is 0 again.
        q_THX, *others = arguments
        found = backend.attend(q_THX.clone(), *others, step)
        torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
    assert not backend.prefill.taken.any()


@pytest.mark.parametrize("rows", [33, 100, 256])
@pytest.mark.parametrize("kind", ["glm-4.7-flash", "deepseek-v3", "mistral-small-4"])
def test_matmuls_of_each_head(kind, rows):
    kind, step = KINDS[kind], make_step([3 * row + 1 for row in range(rows)], [], 16)
    arguments, backend = make_layer(kind, step, torch.bfloat16, 16), build(kind, torch.bfloat16)
    backend.begin(step)
    expected = expected_of(kind, step, *arguments)
    torch.testing.assert_close(backend.attend(*arguments, step).float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_blocks(block_size):
    step = make_step([900, 33], [(4000, 20), (50, 50)], block_size)
    arguments = make_layer(GLM_FLASH, step, torch.bfloat16, block_size)
    backend = build(GLM_FLASH, torch.bfloat16)
    backend.begin(step)
    expected = expected_of(GLM_FLASH, step, *arguments)
    torch.testing.assert_close(backend.attend(*arguments, step).float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("kind", ["glm-4.7-flash", "deepseek-v3"])
def test_decodes_of_several_tokens(kind, queries):
    kind, step = KINDS[kind], make_step([1, 1200, 0, 77], [], 16, queries)
    arguments, backend = make_layer(kind, step, torch.bfloat16, 16), build(kind, torch.bfloat16)
    backend.begin(step)
    expected = expected_of(kind, step, *arguments)
    torch.testing.assert_close(backend.attend(*arguments, step).float(), expected, atol=3e-2, rtol=3e-2)


def test_a_graph_of_a_mixed_step_follows_the_lengths_on_the_device():
    kind, dtype = GLM_FLASH, torch.bfloat16
    step = make_step([900, 33], [(4000, 20), (50, 50)], 16, captured=True)
    arguments, backend = make_layer(kind, step, dtype, 16), build(kind, dtype)
    backend.begin(step)
    backend.attend(*arguments, step)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backend.attend(*arguments, step)
    for lengths in ([900, 33, 4000, 50], [120, 1, 3000, 50]):
        step.kv_lens_S.copy_(ints(lengths))
        positions = [lengths[0] - 1, lengths[1] - 1, *range(lengths[2] - 20, lengths[2]), *range(50)]
        step.positions_T.copy_(ints(positions))
        graph.replay()
        expected = expected_of(kind, step, *arguments)
        torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-flash", "mistral4"])
def test_an_engine_gives_the_oracles_tokens(name, eager, root):
    folder = write_family(root, name)
    prompts = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 16, 31, 64, 100, 150))]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options = dict(dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    with LLM(str(folder), enforce_eager=eager, gpu_memory_utilization=0.05, **options) as llm:
        for _ in range(2):  # from the prefix cache the second time
            outputs = llm.generate(prompts, params)
            for output in outputs:
                ids = output.prompt_token_ids + output.outputs[0].token_ids
                rows = tiny.logprobs(folder, ids)[len(output.prompt_token_ids) - 1 : -1]
                chosen = rows.gather(1, torch.tensor(output.outputs[0].token_ids)[:, None])[:, 0]
                assert (rows.max(dim=1).values - chosen).max() < 1e-3
