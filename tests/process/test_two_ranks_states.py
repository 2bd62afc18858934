"""Models with recurrent layers on two ranks: conversations go on where they ended, on the device, from below it and
at another engine, also with steps that are scheduled ahead, with the tokens of one rank that keeps nothing."""

import random

import pytest

from tests.cpu.engine.test_family_tiers import one_by_one, run
from tests.family_cores import family_cores

pytestmark = pytest.mark.usefixtures("quick_starts")

LENDS, READS = ({"kv_transfer_config": {"kv_role": role}} for role in ("kv_producer", "kv_consumer"))


@pytest.fixture
def build(root):
    defaults = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    with family_cores(root, tensor_parallel_size=2, **defaults) as make:
        yield make


def prompts(count, length=70):
    r = random.Random(11)
    return [[r.randrange(100) for _ in range(length)] for _ in range(count)]


def next_turn(asked, answers):
    return [prompt + answer + [7] * 9 for prompt, answer in zip(asked, answers)]


@pytest.mark.parametrize("below, is_async", [("device", True), ("host", True), ("store", False)])
def test_conversations_go_on_where_they_ended(below, is_async, build, tmp_path):
    options = {
        "device": {},
        "host": {"kv_host_bytes": 32 << 20},
        "store": {"kv_store": f"file://{tmp_path}/kv"},
    }[below]
    plain = build("qwen3.5", tensor_parallel_size=1, enable_prefix_caching=False)
    if below != "device":  # that has room for two conversations
        runner = build("qwen3.5").ranks.runner
        size = runner.states.nbytes + 12 * runner.cache.plan.block_bytes
        size += 8 * runner.states.plan.row_bytes
        options |= {"kv_cache_memory_bytes": size, "kv_load_policy": "always"}
    core = build("qwen3.5", async_scheduling=is_async, **options)
    asked = prompts(5)
    for turn in range(3):
        answers, cached = one_by_one(core, asked)
        assert answers == one_by_one(plain, asked)[0]
        assert all(len(prompt) - 9 - 16 <= found for prompt, found in zip(asked, cached)) or not turn
        asked = next_turn(asked, answers)
    if below != "device":
        assert core.stats().kv_tiers[below].fetched_blocks > 5


def test_two_ranks_hand_prompts_and_states_to_two_ranks(build):
    [prompt] = prompts(1)
    [expected], _, _ = run(build("qwen3.5", tensor_parallel_size=1), [(prompt, {})])
    lender, reader = build("qwen3.5", **LENDS), build("qwen3.5", **READS)
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    [rest], _, [cached] = run(reader, [(prompt, {"output_token_ids": first, "kv_ticket": ticket})])
    assert first + rest == expected and cached == 64
    assert not reader.stats().kv_transfer_failures


@pytest.mark.parametrize("lender_tp, reader_tp", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["qwen3.5", "granite4-mamba", "lfm2", "kimi-linear"])
def test_states_go_between_tensor_parallel_sizes(name, lender_tp, reader_tp, build):
    """A prompt goes there, and the conversation comes back, with the tokens of one rank alone."""
    [prompt] = prompts(1)
    both = {"kv_transfer_config": {"kv_role": "kv_both"}}
    [expected], _, _ = run(build(name, tensor_parallel_size=1), [(prompt, {})], max_tokens=40)
    lender, reader = (build(name, tensor_parallel_size=size, **both) for size in (lender_tp, reader_tp))
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    fields = {"output_token_ids": first, "kv_ticket": ticket}
    [middle], _, [cached] = run(reader, [(prompt, fields)], max_tokens=30)
    assert first + middle == expected[:30] and cached == 64
    begun = prompt + first + middle
    fields = {"output_token_ids": first + middle, "kv_ticket": reader.lend_kv(begun)}
    [rest], _, [cached] = run(lender, [(prompt, fields)], max_tokens=40)
    assert first + middle + rest == expected and cached == 96
    for core in (lender, reader):
        stats = core.stats()
        assert not stats.kv_transfer_failures and sum(one.blocks for one in stats.kv_transfers.values()) > 2
