"""A made-up model with a window in one of its attention layers, between recurrent ones: conversations go on with the
tokens of an engine that keeps nothing, on the device, from below it and at another engine."""

from dataclasses import replace

import pytest

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.weights.source import resolve
from tests.cpu.engine.test_family_tiers import one_by_one, run
from tests.cpu.engine.test_state_transfers import LENDS, READS, prompts
from tests.tiny_families import FULL, LINEAR, write_family

WINDOW, BLOCK = 40, 16


@pytest.fixture
def build(root):
    made = []

    def make(role=None, **options):
        layers = [LINEAR, FULL, LINEAR, FULL, LINEAR]
        folder = write_family(root, "qwen3.5", num_hidden_layers=len(layers), layer_types=layers)
        defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4}
        defaults["kv_cache_memory_bytes"] = 8 << 20
        transfer = {} if role is None else {"kv_transfer_config": role}
        files = resolve(str(folder), None, None)
        kinds = list(files.config.layers)
        kinds[3] = replace(kinds[3], mixer=replace(kinds[3].mixer, window=WINDOW))
        vars(files)["config"] = replace(files.config, layers=tuple(kinds))
        made.append(EngineCore(EngineConfig(model=str(folder), **defaults | transfer | options), files))
        assert [group.window for group in made[-1].scheduler.blocks.groups] == [None, WINDOW]
        return made[-1]

    yield make
    for core in made:
        core.check()
        core.exit()


@pytest.mark.parametrize("below, chunk", [("device", 1024), ("host", 48), ("store", 1024)])
def test_conversations_go_on_where_they_ended(below, chunk, build, tmp_path):
    options = {
        "device": {},
        "host": {"kv_host_bytes": 32 << 20},
        "store": {"kv_store": f"file://{tmp_path}/kv"},
    }[below]
    if below != "device":  # that has room for three conversations
        runner = build().ranks.runner
        size = runner.states.nbytes + 50 * runner.cache.plan.block_bytes
        size += 9 * runner.states.plan.row_bytes
        options |= {"kv_cache_memory_bytes": size, "kv_load_policy": "always"}
    core, plain = build(max_num_batched_tokens=chunk, **options), build(enable_prefix_caching=False)
    asked = prompts(6)
    for turn in range(4):
        answers, cached = one_by_one(core, asked)
        assert answers == one_by_one(plain, asked)[0]
        assert all(len(prompt) - 9 - BLOCK <= found for prompt, found in zip(asked, cached)) or not turn
        asked = [prompt + answer + [7] * 9 for prompt, answer in zip(asked, answers)]
    if below != "device":
        assert core.stats().kv_tiers[below].fetched_blocks > 6


def test_a_third_conversation_begins_behind_the_shared_prompt(build):
    core, plain = build(), build(enable_prefix_caching=False)
    shared, *others = prompts(4)
    asked = [shared + other[:30] for other in others]
    answers, cached = one_by_one(core, asked)
    assert answers == one_by_one(plain, asked)[0] and cached == [0, 0, 96]


@pytest.mark.parametrize("length", [48, 70])
def test_another_worker_computes_the_prompt(length, build):
    [prompt] = prompts(1, length)
    [expected], _, _ = run(build(), [(prompt, {})])
    lender, reader = build(LENDS, max_num_batched_tokens=32), build(READS)
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    [rest], _, [cached] = run(reader, [(prompt, {"output_token_ids": first, "kv_ticket": ticket})])
    assert first + rest == expected and length - BLOCK <= cached <= length
    assert not reader.stats().kv_transfer_failures


def test_sequences_that_are_preempted_get_the_same_tokens(build):
    asked = prompts(4, 60)
    expected, _, _ = run(build(), [(prompt, {}) for prompt in asked], max_tokens=60)
    runner = build().ranks.runner
    size = runner.states.nbytes + 34 * runner.cache.plan.block_bytes
    core = build(kv_cache_memory_bytes=size, max_num_batched_tokens=32, max_model_len=160)
    tokens, _, _ = run(core, [(prompt, {}) for prompt in asked], max_tokens=60)
    assert tokens == expected and core.stats().num_preemptions > 0
