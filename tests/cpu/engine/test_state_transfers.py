"""Engines with recurrent layers hand prompts and conversations over: a reader begins at a snapshot of the lender's,
with the tokens of an engine alone."""

import random
import time

import pytest

from shoal import SamplingParams
from shoal.api import Request
from shoal.engine.peers.prefetches import Prefetches
from shoal.kv.places import places
from tests.cpu.engine.test_family_tiers import DEADLINE_S, one_by_one, run
from tests.family_cores import family_cores

NAMES = ["qwen3.5", "qwen3-next", "granite4-mamba", "lfm2", "nemotron-h"]
LENDS, READS = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def build(root):
    with family_cores(root, max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=16 << 20) as make:
        yield lambda name, role=None, **options: make(name, kv_transfer_config=role, **options)


def prompts(count, length=100):
    """Prompts whose answers do not depend on rounding: the tiny models have near ties."""
    r = random.Random(11)
    return [[r.randrange(100) for _ in range(length)] for _ in range(count)]


def num_read(core):
    """Returns the blocks that an engine has read from others, without one that failed."""
    stats = core.stats()
    assert not stats.kv_transfer_failures
    return sum(one.blocks for one in stats.kv_transfers.values())


@pytest.mark.parametrize("length", [48, 70])
def test_another_worker_computes_the_prompt(name, length, build):
    [prompt] = prompts(1, length)
    [expected], _, _ = run(build(name), [(prompt, {})])
    lender, reader = build(name, LENDS, max_num_batched_tokens=32), build(name, READS)
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    assert ticket is not None
    [rest], _, [cached] = run(reader, [(prompt, {"output_token_ids": first, "kv_ticket": ticket})])
    assert first + rest == expected and length - 16 <= cached <= length
    needed = places(reader.scheduler.blocks.groups, cached)
    assert num_read(reader) == len(needed) + reader.ranks.runner.states.plan.num_blocks
    lender.check()
    reader.check()


def test_a_prompt_shorter_than_a_block_has_no_ticket(build):
    lender = build("qwen3.5", LENDS)
    assert run(lender, [(prompts(1, 15)[0], {"offers_kv": True})], max_tokens=1)[1] == [None]


@pytest.mark.parametrize("length", [17, 33, 48])
def test_a_continuation_starts_with_the_snapshot_that_was_prefetched(length, build):
    name = "qwen3.5"
    [prompt] = prompts(1, length)
    [expected], _, _ = run(build(name), [(prompt, {})])
    lender, reader = build(name, LENDS), build(name, READS)
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    reader.add(Request("ahead", list(prompt), params, fetches_only=True, kv_ticket=ticket))
    held = reader.parts.find(Prefetches)._held
    until = time.monotonic() + DEADLINE_S
    while not held:
        assert time.monotonic() < until and reader.step() == []
    reader.check()
    [rest], _, [cached] = run(reader, [(prompt, {"output_token_ids": first, "continues": "ahead"})])
    assert first + rest == expected and length - 16 <= cached <= length


def test_a_conversation_goes_on_at_another_worker(name, build):
    """As when a worker drains: what it has computed of the answer is lent as well."""
    [prompt] = prompts(1)
    [expected], _, _ = run(build(name), [(prompt, {})], max_tokens=60)
    lender, reader = build(name, LENDS), build(name, READS)
    [begun], _, _ = run(lender, [(prompt, {})], max_tokens=40)
    ticket = lender.lend_kv(prompt + begun)
    fields = {"output_token_ids": begun, "kv_ticket": ticket}
    [rest], _, [cached] = run(reader, [(prompt, fields)], max_tokens=60)
    assert begun + rest == expected and 140 - 17 <= cached < 140
    turn = prompt + expected + [7] * 9
    [answer], _, [cached] = run(reader, [(turn, {})])
    assert answer == run(build(name), [(turn, {})])[0][0] and cached >= 160 - 16


def test_what_is_lent_outlives_its_eviction(build):
    """A snapshot that makes room while it is lent is rewritten when the reader is done."""
    for beside in ({}, {"num_gpu_blocks_override": 14}):
        asked = prompts(4)
        [expected], _, _ = run(build("qwen3.5"), [(asked[0], {})])
        probe = build("qwen3.5")
        runner = probe.ranks.runner
        size = runner.states.nbytes + 30 * runner.cache.plan.block_bytes
        sizes = beside or {"kv_cache_memory_bytes": size}
        lender, reader = build("qwen3.5", LENDS, **sizes), build("qwen3.5", READS)
        run(lender, [(asked[0], {})], max_tokens=1)
        ticket = lender.lend_kv(asked[0])
        one_by_one(lender, asked[1:] * 2)
        lender.check()
        [tokens], _, [cached] = run(reader, [(asked[0], {"kv_ticket": ticket})])
        assert tokens == expected and cached == 96
        lender.parts.find(type(lender.peers)).take_back(ticket, "the reader is done")
        lender.check()
        assert not lender.parts.find(type(lender.peers)).held_blocks()


def test_a_reset_takes_back_what_is_lent(build):
    [prompt] = prompts(1)
    lender, reader = build("qwen3.5", LENDS), build("qwen3.5", READS)
    [expected], _, _ = run(lender, [(prompt, {})])
    ticket = lender.lend_kv(prompt)
    assert lender.reset_prefix_cache()
    lender.check()
    [tokens], _, [cached] = run(reader, [(prompt, {"kv_ticket": ticket})])
    assert tokens == expected and cached == 0 and reader.stats().kv_transfer_failures == {"ended": 1}


def test_states_of_another_dtype_are_computed(build):
    [prompt] = prompts(1)
    lender, reader = build("qwen3.5", LENDS), build("qwen3.5", READS, mamba_ssm_cache_dtype="bfloat16")
    run(lender, [(prompt, {})])
    [tokens], _, [cached] = run(reader, [(prompt, {"kv_ticket": lender.lend_kv(prompt)})])
    assert tokens == run(build("qwen3.5", mamba_ssm_cache_dtype="bfloat16"), [(prompt, {})])[0][0]
    assert cached == 0 and reader.stats().kv_transfer_failures == {"incompatible": 1}


def test_fp8_caches_hand_over_their_states(build):
    [prompt] = prompts(1)
    fp8 = {"kv_cache_dtype": "fp8"}
    lender, reader = build("qwen3.5", LENDS, **fp8), build("qwen3.5", READS, **fp8)
    [expected], _, _ = run(lender, [(prompt, {})])
    [tokens], _, [cached] = run(reader, [(prompt, {"kv_ticket": lender.lend_kv(prompt)})])
    assert tokens == expected and cached == 96 and num_read(reader) > 6
