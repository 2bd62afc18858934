"""Engines with recurrent layers: conversations go on where their last turns left states behind, on the device and
from host memory, with the tokens of an engine that keeps nothing."""

import random
import time

import pytest

from shoal import SamplingParams
from shoal.api import Request
from shoal.engine.offload.offloader import Offloader
from shoal.errors import ConfigError
from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from tests.family_cores import family_cores, numbers

NAMES = ["qwen3.5", "qwen3-next"]
COUNT = 20
DEADLINE_S = 60


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def build(root):
    with family_cores(root, max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=16 << 20) as make:
        yield make


def ask(core, prompt):
    """Returns the answer, the number of cached tokens and what the prefill says."""
    core.add(Request("r", list(prompt), SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)))
    tokens, cached, spans = [], 0, []
    until = time.monotonic() + DEADLINE_S
    while core.has_work:
        assert time.monotonic() < until, "the work does not end"
        for output in core.step():
            tokens += output.token_ids
            cached = max(cached, output.num_cached_tokens)
            spans += output.spans or []
    while core.tick():
        assert time.monotonic() < until, "copies do not end"
    [prefill] = [span.attributes for span in spans if span.name == "prefill"]
    return tokens, cached, prefill


def conversations(core, plain, count=1, turns=3):
    """Asks turn after turn of some conversations. Returns the numbers of old and of cached tokens of each turn but
    the first ones."""
    known, found = [numbers(70 + 9 * i, i) for i in range(count)], []
    for turn in range(turns):
        for i in range(count):
            old = len(known[i])
            prompt = known[i] + numbers(15, 10 * turn + i) if turn else known[i]
            tokens, cached, _ = ask(core, prompt)
            assert tokens == ask(plain, prompt)[0]
            known[i] = prompt + tokens
            if turn:
                found.append((old, cached))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 40},
        {"max_num_batched_tokens": 24},
        {"mamba_ssm_cache_dtype": "float32"},
    ],
    ids=str,
)
def test_a_turn_computes_its_own_tokens_and_at_most_a_block(name, options, build):
    core, plain = build(name, **options), build(name, enable_prefix_caching=False)
    for old, cached in conversations(core, plain):
        assert old - 16 <= cached <= old


def test_conversations_that_do_not_fit_on_the_device_go_on_from_host_memory(name, build):
    probe = build(name)
    runner = probe.ranks.runner
    size = 30 * runner.cache.plan.block_bytes + runner.states.nbytes + 8 * runner.states.plan.row_bytes
    below = {"kv_host_bytes": 64 << 20, "kv_load_policy": "always"}
    core, plain = build(name, kv_cache_memory_bytes=size, **below), build(name, enable_prefix_caching=False)
    for old, cached in conversations(core, plain, count=6):
        assert old - 16 <= cached <= old
    assert core.stats().kv_tiers["host"].fetched_blocks > 6 * runner.states.plan.num_blocks


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_another_engine_goes_on_from_what_lies_below(name, kind, build, tmp_path):
    below = {
        "disk": {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 64 << 20},
        "store": {"kv_store": f"file://{tmp_path}/store"},
    }[kind]
    below["kv_load_policy"] = "always"
    first = build(name, **below)
    prompt = numbers(100, 0)
    known = prompt + ask(first, prompt)[0]
    first.exit()
    plain = build(name, enable_prefix_caching=False)
    # The answer may be another one in the next turn.
    for turn, least in (known + numbers(9, 1), len(known) - 16), (prompt + numbers(40, 2), len(prompt) - 16):
        expected, core = ask(plain, turn)[0], build(name, **below)
        tokens, cached, _ = ask(core, turn)
        assert tokens == expected and least <= cached <= least + 16
        core.exit()
    other = build(name, **below, mamba_ssm_cache_dtype="bfloat16")
    assert ask(other, turn)[1] == 0


def test_an_engine_that_ends_writes_the_states_of_its_last_request(build, tmp_path):
    """Regression: the snapshots of requests that ended with the last step were not written."""
    store = {"kv_store": f"file://{tmp_path}/store", "kv_load_policy": "always"}
    first, prompt = build("qwen3.5", **store), numbers(100, 0)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    first.add(Request("r", prompt, params))
    while first.has_work:
        first.step()
    first.exit()
    assert ask(build("qwen3.5", **store), prompt)[1] == 96


def test_an_engine_that_ends_writes_more_snapshots_than_its_host_memory_holds(build, tmp_path, monkeypatch):
    """Regression: snapshots on their way to the store pushed each other out of host memory."""
    # None leaves while the engine runs, when later ones may push earlier ones out before they are written.
    monkeypatch.setattr(Offloader, "offload", lambda self, idle=False: None)
    runner = build("qwen3.5").ranks.runner
    block, num_parts = runner.cache.plan.block_bytes, runner.states.plan.num_blocks
    store = {"kv_store": f"file://{tmp_path}/store", "kv_load_policy": "always"}
    store |= {"kv_host_bytes": 8 * num_parts * block, "max_num_seqs": 8}
    first, prompts = build("qwen3.5", **store), [numbers(100, i) for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        first.add(Request(str(i), prompt, params))
    while first.has_work:
        first.step()
    assert len(first.scheduler.blocks.left_behind) > len(prompts)
    first.exit()
    other = build("qwen3.5", **store)
    assert [ask(other, prompt)[1] for prompt in prompts] == [96] * len(prompts)


def test_a_prompt_of_which_all_but_the_last_token_is_found_begins_as_a_decode(name, build):
    core, prompt = build(name), numbers(97, 0)
    expected = ask(core, prompt)[0]
    assert ask(core, prompt)[:2] == (expected, 96)


def test_what_is_computed_again_for_want_of_a_state_is_reported(name, build):
    core, system = build(name), numbers(83, 0)
    said = [ask(core, system + numbers(30, i))[1:] for i in range(1, 4)]
    assert [(cached, prefill.get("recomputed")) for cached, prefill in said] == [
        (0, None),
        (0, 80),
        (80, None),
    ]


def test_rows_are_taken_from_the_size_of_the_cache(name, build):
    core = build(name, kv_cache_memory_bytes=8 << 20)
    used = core.memory_usage()["kv_cache"]["device_bytes"]
    block_bytes = core.ranks.runner.cache.plan.block_bytes
    assert (8 << 20) - block_bytes < used <= 8 << 20
    rows, row = core.ranks.runner.states.nbytes, core.ranks.runner.states.plan.bytes_of_sequence
    least = rows + len(core.scheduler.blocks.groups) * block_bytes
    message = rf"kv_cache_memory_bytes must be at least {least} .* max_num_seqs 4, got {rows}: .* {row} bytes"
    with pytest.raises(ConfigError, match=message + ".* lower max_num_seqs to 3"):
        build(name, kv_cache_memory_bytes=rows)
    with pytest.raises(ConfigError, match=rf"got {row}: .*; raise it$"):
        build(name, kv_cache_memory_bytes=row)
    assert build(name, kv_cache_memory_bytes=least).num_blocks == len(core.scheduler.blocks.groups)


def test_kv_blocks_that_are_counted_leave_room_for_snapshots_beside_them(name, build):
    core = build(name, num_gpu_blocks_override=10)
    stats = core.stats()
    assert stats.num_blocks == stats.num_free_blocks == 10 and stats.num_free_snapshots == 16


@pytest.mark.parametrize("below", [{}, {"kv_host_bytes": 64 << 20, "kv_load_policy": "always"}], ids=str)
def test_a_router_counts_what_an_engine_can_resume(below, build):
    """Regression: blocks counted whose snapshot was evicted before them, or behind which no prompt goes on."""
    runner = build("qwen3.5").ranks.runner
    size = 40 * runner.cache.plan.block_bytes + runner.states.nbytes + 4 * runner.states.plan.row_bytes
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    core = build("qwen3.5", kv_cache_memory_bytes=size, kv_events_config=events, **below)
    index, rank, r = KvIndexer(16), WorkerRank("w"), random.Random(3)
    known, counts = [numbers(70, 0)], []
    for turn in range(40):
        base = r.choice(known[-8:])
        prompt = base[: r.choice((len(base), r.randrange(len(base))))] + numbers(15, turn)
        for batch in core.events.drain():
            for event in batch.events:
                index.apply(rank, event)
        found = index.find_matches(prompt[:-1]).get(rank, Overlap())
        tokens, cached, prefill = ask(core, prompt[:400])
        assert cached == 16 * (found.device + found.host), (turn, found, prefill)
        known.append((prompt + tokens)[:380])
        counts.append((found.device > 0, found.host > 0, prefill.get("recomputed", 0) > 0))
    assert any(device for device, _, _ in counts) and any(again for _, _, again in counts)
    assert any(host for _, host, _ in counts) == bool(below)
