"""Models whose layers differ in what they cache: how blocks lie in one memory, the tables that steps send, options
that read a sequence's tokens, memory, sleep, and what an engine reports."""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.resolve import resolve_config
from shoal.engine.runner.batch import BatchBuilder
from shoal.engine.runner.cache_plan import plan_cache
from shoal.engine.runner.kv_cache import KvCache
from shoal.engine.runner.packed_step import StepHeader, section_spans
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import ConfigError, RequestError
from shoal.kernels.state import FIELDS, StateLayout
from shoal.kinds.rope import RopeConfig
from shoal.kv.groups import NO_BLOCK, LayerGroup
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.telemetry.metrics import ModelMetrics
from tests import tiny

COUNT = 24
SHARED = random.Random(5).choices(range(256), k=64)
PROMPTS = [
    SHARED[: random.Random(i).choice((0, 15, 33, 64))] + random.Random(i + 50).choices(range(256), k=n)
    for i, n in enumerate((1, 16, 17, 40, 100))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=["qwen3-windows", "mistral-window"])
def folder(root, request):
    """Two groups of layers, and one group whose layers all slide."""
    return tiny.write_model(root, request.param)


@pytest.fixture
def build():
    engines = []

    def start(folder, **options):
        defaults = dict(device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 20)
        engines.append(LLM(str(folder), **defaults | options))
        return engines[-1]

    yield start
    for llm in engines:
        llm.core.check()
        llm.core.exit()


# Blocks in memory


def attention(num_kv_heads, head_dim, window=None, kv_layer=None):
    rope = RopeConfig()
    return LayerKind(AttentionKind(8, num_kv_heads, head_dim, 1.0, rope, window, kv_layer=kv_layer))


def resolved(*layers, **options):
    model = ModelConfig("llama", 40, 16, 24, 256, 1e-6, layers)
    defaults = dict(model="m", device="cpu", dtype="float32", max_model_len=128)
    return resolve_config(EngineConfig(**defaults | options), model), model


WIDE, SLIDING = attention(2, 32), attention(4, 8, window=20)
# The last two layers have no cache of their own; tokens of the sliding layers take half the bytes.
MIXED = (SLIDING, SLIDING, WIDE, SLIDING, SLIDING, WIDE)
MIXED += attention(2, 32, kv_layer=5), attention(4, 8, 20, kv_layer=4)

# Four groups of two windowed layers, of which the last has padding, and one of two layers that see everything.
UNEVEN = (attention(2, 32, window=20),) * 7 + (WIDE,) * 2


def test_groups_of_unlike_layers_fill_equal_blocks_of_one_memory():
    plan = plan_cache(*resolved(*MIXED))
    assert [(group.layers, group.block_size, group.window) for group in plan.groups] == [
        ((2, 5), 16, None),
        ((0, 1), 32, 20),
        ((3, 4), 32, 20),
    ]
    assert len({spec.block_bytes for spec in plan.specs}) == 1
    cache = KvCache(plan, MIXED, None, {}, torch.device("cpu"))
    cache.allocate(7)
    assert cache.blocks.shape == (7, plan.block_bytes // 4)
    cached = [i for group in plan.groups for i in group.layers]
    assert sorted(cached) == [0, 1, 2, 3, 4, 5]
    for g, (group, view) in enumerate(zip(plan.groups, cache.views(), strict=True)):
        for i, layer in enumerate(group.layers):
            own = cache.layers[layer]
            kind = MIXED[layer].mixer
            assert own.table == g and own.window == kind.window == group.window
            assert own.blocks.shape == (7, 2, kind.num_kv_heads, group.block_size, kind.head_dim)
            assert (
                own.blocks.data_ptr() == view.addresses[i] and own.blocks.stride(0) == cache.blocks.shape[1]
            )
    assert cache.layers[6] is cache.layers[5] and cache.layers[7] is cache.layers[4]


def test_one_chunk_of_positions_is_no_window():
    """An engine of at most one of Llama 4's chunks has one group of blocks, and each kernel for its layers."""
    chunk = LayerKind(replace(attention(2, 32).attention, window=64, in_chunks=True))
    for longest, windows in ((65, [None, 64]), (64, [None])):
        plan = plan_cache(*resolved(WIDE, chunk, max_model_len=longest))
        assert [group.window for group in plan.groups] == windows
        cache = KvCache(plan, (WIDE, chunk), None, {}, torch.device("cpu"))
        assert [layer.in_chunks for layer in cache.layers] == [False, len(windows) > 1]


@pytest.mark.parametrize(("layers", "padded"), [(MIXED, 0), (UNEVEN, 1)])
def test_layers_of_a_group_lie_apart_within_a_block(layers, padded):
    plan = plan_cache(*resolved(*layers))
    assert sum(spec.padding > 0 for spec in plan.specs) == padded
    cache = KvCache(plan, layers, None, {}, torch.device("cpu"))
    cache.allocate(3)
    for group, spec in zip(plan.groups, plan.specs, strict=True):
        cache.blocks.zero_()
        for i in group.layers:
            assert not cache.layers[i].blocks[1].any()
            cache.layers[i].blocks[1] = i + 1.0
        written = (cache.blocks[1] != 0).sum() * 4
        assert written == spec.block_bytes - spec.padding and not cache.blocks[[0, 2]].any()


def test_ranks_hold_their_heads_in_blocks_of_equal_bytes():
    config, model = resolved(*MIXED, tensor_parallel_size=2)
    plans = [plan_cache(config, model, rank) for rank in range(2)]
    assert plans[0].groups == plans[1].groups and plans[0].block_bytes == plans[1].block_bytes
    for spec, other in zip(plans[0].specs, plans[1].specs, strict=True):
        assert (spec.first_head, other.first_head) == (0, spec.num_heads // 2) and spec.mismatch(
            other
        ) is None


def test_models_with_one_kind_of_layer_have_one_group_without_padding():
    for layers in ([WIDE] * 3, [SLIDING] * 5):
        plan = plan_cache(*resolved(*layers))
        [group], [spec] = plan.groups, plan.specs
        assert group.layers == tuple(range(len(layers))) and (group.block_size, spec.padding) == (16, 0)


def test_a_count_of_blocks_is_refused_for_several_groups():
    message = "num_gpu_blocks_override must be unset for m, whose layers form .* got 100; size the cache by kv_cache"
    with pytest.raises(ConfigError, match=message):
        resolved(*MIXED, num_gpu_blocks_override=100)
    resolved(*[SLIDING] * 2, num_gpu_blocks_override=100)


# Tables


def test_each_table_has_what_its_group_needs_and_nothing_comes_twice():
    """The device's tables under random schedules. What was given back is not sent; what a token sees is there."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    groups = LayerGroup((0,), 4), LayerGroup((1,), 8, window=6), LayerGroup((2,), 4, window=9)
    scheduler = Scheduler(
        num_blocks=40,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=64,
        groups=groups,
    )
    layout = StateLayout(4, 16, len(groups))
    builder, state = BatchBuilder(layout, 4), np.full(layout.size, -7, np.int32)
    sent_before = {}
    for step in range(400):
        if rng.random() < 0.2 and len(scheduler.waiting) < 4:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
            params = SamplingParams(max_tokens=rng.randint(1, 20), seed=1, ignore_eos=True)
            scheduler.add(Request(f"r{step}", prompt, params))
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        if not plan.scheduled:
            continue
        packed, _ = builder.build(plan)
        spans = section_spans(StepHeader.of(packed))
        addresses, values = (packed[slice(*spans[name])] for name in ("addresses", "values"))
        assert len(set(addresses.tolist())) == len(addresses)
        state[addresses] = values
        for entry in plan.scheduled:
            base = layout.row_address(entry.row) + FIELDS
            admission = entry.seq, entry.seq.num_admissions
            again = sent_before.get(entry.row) == admission
            sent_before[entry.row] = admission
            for t, (group, table) in enumerate(zip(groups, entry.seq.tables, strict=True)):
                at = base + t * layout.table_stride
                own = addresses[(addresses >= at) & (addresses < at + layout.table_stride)] - at
                assert all(table[i] != NO_BLOCK for i in own), "an entry that was given back was sent"
                if again:
                    assert len(own) <= entry.num_tokens + 12, "a table was sent again"
                first = group.first_block(entry.start)
                needed = range(first, group.num_blocks(entry.start + entry.num_tokens))
                assert [state[at + i] for i in needed] == [table[i] for i in needed]
        sampled = [[rng.randrange(3)] for entry in plan.scheduled if entry.samples]
        scheduler.update(plan, sampled)
    scheduler.check()


# Engines


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=11, max_num_seqs=3),
        dict(max_num_batched_tokens=48),
        dict(kv_cache_memory_bytes=3 << 16, max_num_seqs=16),
        dict(block_size=8, enable_prefix_caching=False),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_runs(folder, build, options):
    llm = build(folder, **options)
    expected = [tiny.greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    for _ in range(2):
        assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
        llm.core.check()


def test_what_lies_in_blocks_before_a_window_reaches_no_answer(folder, build):
    """Whenever a step has run, all blocks are poisoned but those that running sequences hold."""
    llm = build(folder, max_num_batched_tokens=40, enable_prefix_caching=False)
    cache, scheduler = llm.core.ranks.runner.cache, llm.core.scheduler
    step = llm.core.loop.step

    def poisoned_step():
        with torch.inference_mode():
            return poisoned(step())

    def poisoned(outputs):
        held = {b for seq in scheduler.running for table in seq.tables for b in table}
        others = [b for b in range(len(cache.blocks)) if b not in held]
        cache.blocks[others] = float("nan")
        return outputs

    llm.core.loop.step = poisoned_step
    expected = [tiny.greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected


def penalized(folder, prompt, count, repetition, presence, frequency):
    """Greedy decoding with penalties as vLLM has them, by the oracle's logits."""
    ids = list(prompt)
    for _ in range(count):
        logits = tiny.logits(folder, ids)
        counts = torch.bincount(torch.tensor([*ids[len(prompt) :], 0]), minlength=len(logits))
        counts[0] -= 1
        seen = torch.zeros(len(logits), dtype=torch.bool)
        seen[ids] = True
        changed = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, changed, logits) - frequency * counts - presence * (counts > 0)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_penalties_see_tokens_before_the_window(folder, build):
    llm = build(folder, max_num_batched_tokens=30)
    values = 1.3, 0.4, 0.7
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, **dict(zip(names, values)))
    expected = [penalized(folder, prompt, COUNT, *values) for prompt in PROMPTS]
    assert ids_of(llm.generate(PROMPTS, params)) == expected
    assert ids_of(llm.generate(PROMPTS, params)) == expected  # with cached prefixes


def test_bad_words_are_banned_behind_tokens_before_the_window(folder, build):
    llm = build(folder, max_num_batched_tokens=30)
    plain = ids_of(llm.generate(PROMPTS[4:], GREEDY))[0]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    request = Request("r", PROMPTS[4], params, bad_word_ids=(tuple(plain[5:7]),))
    llm.core.add(request)
    tokens = []
    while llm.core.loop.has_work:
        for output in llm.core.step():
            tokens += output.token_ids
    assert tokens[:6] == plain[:6] and tokens[6] != plain[6]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_gets_new_weights(folder, build, level):
    llm = build(folder, enable_sleep_mode=True)
    expected = [tiny.greedy(folder, prompt, COUNT) for prompt in PROMPTS]
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == expected
    used = llm.memory_usage()["kv_cache"]["device_bytes"]
    assert used == llm.core.num_blocks * llm.core.ranks.runner.cache.plan.block_bytes
    llm.sleep(level=level)
    assert llm.memory_usage()["kv_cache"]["device_bytes"] == 0
    llm.wake_up()
    if level == 2:
        llm.update_weights(str(folder))
    outputs = llm.generate(PROMPTS, GREEDY)
    assert ids_of(outputs) == expected


def test_use_of_the_cache_is_reported_by_group(root, build, caplog):
    folder = tiny.write_model(root, "qwen3-windows")
    with caplog.at_level(logging.INFO, logger="shoal.engine.core"):
        llm = build(folder, max_num_batched_tokens=40)
    plan, scheduler = llm.core.ranks.runner.cache.plan, llm.core.scheduler
    assert f"{llm.core.num_blocks} KV blocks of 16 tokens in 3 groups of layers" in caplog.text
    # of 256 tokens the first group keeps 16 blocks, each window the blocks for 19 tokens, and one sequence a chunk
    fitting = 1 + (llm.core.num_blocks - (16 + 2 * 5)) / (16 + 2 * 3)
    assert f"{fitting:.1f} sequences of 256" in caplog.text
    llm.core.add(Request("r", PROMPTS[4], GREEDY))
    for _ in range(12):
        llm.core.step()
    stats = llm.stats()
    [seq] = scheduler.running
    used = [len(table) - table.count(NO_BLOCK) for table in seq.tables]
    assert [group.used_blocks for group in stats.kv_groups] == used and used[0] > used[1] == used[2]
    assert [(group.num_layers, group.window) for group in stats.kv_groups] == [(1, None), (1, 19), (1, 19)]
    assert sum(used) == stats.num_blocks - stats.num_free_blocks
    assert plan.num_blocks == stats.num_blocks
    metrics = ModelMetrics("m", 256, {})
    [family] = [m for m in metrics.collect(stats, None, 0) if m.name == "shoal:kv_cache_usage_perc_by_group"]
    shares = {(s.labels["group"], s.labels["window"]): s.value for s in family.samples}
    assert shares == {
        (str(g), window): used[g] / stats.num_blocks for g, window in enumerate(("full", "19", "19"))
    }
    llm.core.scheduler.abort_all()
    llm.core.step()


def test_a_small_cache_reports_the_longest_sequence_that_it_takes(root, build):
    """Regression: it reported its share of a longer sequence, but the blocks of windows are needed at any length."""
    folder = tiny.write_model(root, "qwen3-windows")
    core = build(folder, kv_cache_memory_bytes=1 << 16).core
    longest = core.kv_cache_tokens
    assert 64 < longest < 256
    core.add(Request("a", [1] * (longest - 1), GREEDY))
    with pytest.raises(RequestError, match=f"{longest} tokens long"):
        core.add(Request("b", [1] * longest, GREEDY))


def test_a_cache_without_a_block_for_each_group_is_refused(root):
    folder = tiny.write_model(root, "qwen3-windows")
    with pytest.raises(
        ConfigError, match="no room for 3 groups of layers, of which each needs a KV block of"
    ):
        LLM(str(folder), device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=10_000)
