"""Engines with tiers below the device, on the CPU: the same tokens, found again, whatever happens in
between."""

import contextlib
import random
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from shoal import LLM, SamplingParams
from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.offload.costs import Costs
from shoal.engine.offload.offloader import Offloader, OffloadPolicy
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.offload.transfers import Done
from shoal.engine.runner import start_up
from shoal.engine.runner.rank_kv import RankKv
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import ConfigError, EngineDeadError
from shoal.files.io_threads import Breaker
from shoal.kv.tiers.block_folder import BlockFolder
from shoal.kv.tiers.host import HostTier
from shoal.memory.slab import HostSlab
from tests import tiny

BLOCK = 16
# 224 tokens on the device
SMALL = dict(num_gpu_blocks_override=14, max_model_len=192, kv_load_policy="always")
HOST = dict(kv_host_bytes=16 << 20)


def offload_policy(**options):
    """For blocks of two tokens, and a host tier that has room for all that leaves."""
    given = dict(
        block_size=2, block_bytes=1, has_host_tier=True, host_watermark=10, max_leaving=9, copy_blocks=9
    )
    return OffloadPolicy(**given | options)


def params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options)


def prompts(count=9, length=100, seed=5):
    r = random.Random(seed)
    return [[r.randrange(256) for _ in range(length)] for _ in range(count)]


def one_by_one(llm, asked, **options):
    """Tokens, and how many of each prompt came from a cache."""
    outputs = [llm.generate([prompt], params(**options))[0] for prompt in asked]
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


def together(llm, asked, **options):
    return [o.outputs[0].token_ids for o in llm.generate(asked, params(**options))]


@pytest.fixture(scope="module")
def expected(root):
    folder = tiny.write_model(root, "qwen3")
    return [tiny.greedy(folder, prompt, 8) for prompt in prompts()]


@pytest.fixture
def disk(tmp_path):
    return dict(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=64 << 20)


def all_blocks(tmp_path):
    return sorted(path for path in (tmp_path / "kv").rglob("*.kv"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kv_offload_policy="register"),
        dict(kv_eviction_policy="lfu"),
        dict(async_scheduling=True),
        dict(max_num_batched_tokens=24),
    ],
    ids=str,
)
def test_a_cache_too_small_for_all_prompts_finds_them_in_host_memory(options, build, expected):
    llm = build(**SMALL, **HOST, **options)
    assert one_by_one(llm, prompts()) == (expected, [0] * 9)
    tokens, cached = one_by_one(llm, prompts())
    assert tokens == expected and cached == [96] * 9
    assert together(llm, prompts()) == expected
    llm.core.check()
    stats = llm.stats()
    assert stats.kv_dropped_blocks == 0 and stats.external_prefix_cache_hits >= 9 * 96 - 224
    assert stats.kv_tiers["host"].stored_blocks >= 54 and stats.kv_tiers["host"].fetched_blocks >= 40
    assert 0 < stats.kv_tiers["host"].used_bytes <= stats.kv_tiers["host"].capacity_bytes <= 16 << 20


@pytest.mark.parametrize("write_s", [0, 0.01])
@pytest.mark.parametrize("host", [{}, dict(kv_host_bytes=1 << 17)], ids=["no host tier", "a small host tier"])
def test_tiers_that_hold_less_than_what_comes_by_take_each_block_once_a_round(
    host, write_s, build, tmp_path, monkeypatch
):
    """Regression: each block that a full tier took evicted another wanted one, up to a thousand times while the engine was idle; and blocks that waited for a slow disk were copied out again."""
    prepare = BlockFolder.prepare

    def slowly(*args):
        time.sleep(write_s)
        return prepare(*args)

    monkeypatch.setattr(BlockFolder, "prepare", slowly)
    llm = build(**SMALL, **host, kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=300_000)
    rounds, num_blocks = 4, sum((len(prompt) + 8) // BLOCK for prompt in prompts())
    for _ in range(rounds):
        one_by_one(llm, prompts())
        deadline = time.monotonic() + 5
        while llm.core.tick() and time.monotonic() < deadline:
            time.sleep(0.002)
    for stats in llm.stats().kv_tiers.values():
        assert stats.stored_blocks <= rounds * num_blocks


def test_conversations_give_the_same_tokens_with_and_without_tiers(build, disk):
    """Eight conversations of four turns, three at a time, in a cache of a third of what they need."""

    def talk(llm):
        r = random.Random(2)
        histories = [[r.randrange(256) for _ in range(40)] for _ in range(8)]
        answers = []
        for _ in range(4):
            for at in range(0, 8, 3):
                group = histories[at : at + 3]
                for history in group:
                    history += [r.randrange(256) for _ in range(6)]
                for history, answer in zip(group, together(llm, group, max_tokens=10)):
                    history += answer
                    answers.append(answer)
        return answers

    options = dict(max_model_len=192, kv_load_policy="always")
    alone = talk(build(max_model_len=192, enable_prefix_caching=False))
    llm = build(num_gpu_blocks_override=18, **options, **HOST, **disk)
    assert talk(llm) == alone
    assert llm.stats().external_prefix_cache_hits > 300
    host = llm.stats().kv_tiers["host"]
    small_host = build(
        num_gpu_blocks_override=18,
        **options,
        kv_host_bytes=12 * (host.stored_bytes // host.stored_blocks),
        **disk,
    )
    assert talk(small_host) == alone
    staged = build(num_gpu_blocks_override=18, **options, **disk)
    assert talk(staged) == alone


def test_what_one_request_fetches_another_does_not_fetch_again(build, expected):
    llm = build(**SMALL, **HOST)
    one_by_one(llm, prompts())
    before = llm.stats().kv_tiers["host"].fetched_blocks
    first = prompts()[0]
    assert together(llm, [first + [7], first + [8], first + [9]]) == together(
        llm, [first + [7], first + [8], first + [9]]
    )
    assert llm.stats().kv_tiers["host"].fetched_blocks - before <= 6


def test_a_second_engine_finds_on_disk_what_the_first_has_left(build, expected, disk, tmp_path):
    first = build(**SMALL, **disk)
    assert one_by_one(first, prompts())[0] == expected
    first.exit()
    assert len(all_blocks(tmp_path)) == 54
    second = build(**SMALL, **disk)
    assert one_by_one(second, prompts()) == (expected, [96] * 9)
    assert second.stats().kv_tiers["disk"].fetched_blocks == 54


@pytest.mark.parametrize("host", [{}, HOST], ids=["no host tier", "a host tier"])
def test_blocks_that_a_store_missed_come_to_it_though_they_lie_on_disk(host, build, disk, tmp_path):
    """A block that one tier below has is one more for the others; the disk is an earlier engine's."""
    first = build(**SMALL, **host, **disk)
    one_by_one(first, prompts()[:2])
    first.exit()
    assert (num_blocks := len(all_blocks(tmp_path))) >= 12
    second = build(**SMALL, **host, **disk, kv_store=f"file://{tmp_path / 'store'}")
    one_by_one(second, prompts()[:2])
    deadline = time.monotonic() + 10
    while second.core.tick() and time.monotonic() < deadline:
        time.sleep(0.002)
    second.exit()
    assert len(list((tmp_path / "store").rglob("*.kv"))) >= num_blocks


def test_exit_writes_nothing_when_it_may_take_no_time(build, disk, tmp_path):
    llm = build(**SMALL, **HOST, **disk, kv_flush_timeout=0.0)
    llm.generate([prompts()[0]], params())
    written = len(all_blocks(tmp_path))
    llm.exit()
    assert len(all_blocks(tmp_path)) <= max(written, 6)


def test_a_disk_that_takes_nothing_is_not_offered_the_same_blocks_at_every_look(build, disk, monkeypatch):
    monkeypatch.setattr(Breaker, "allows", lambda self: False)
    llm = build(**SMALL, **disk, **HOST)
    monkeypatch.setattr("shoal.engine.offload.writer.WRITE_REST_S", 1e9)
    one_by_one(llm, prompts())
    assert 0 < llm.stats().kv_tiers["disk"].failed_blocks <= 54


def test_damaged_files_cost_time_and_no_token(build, expected, disk, tmp_path):
    first = build(**SMALL, **disk)
    one_by_one(first, prompts())
    first.exit()
    r = random.Random(3)
    for path in all_blocks(tmp_path)[::3]:
        data = bytearray(path.read_bytes())
        data[r.randrange(len(data))] ^= 0x10
        path.write_bytes(data if r.random() < 0.5 else data[: r.randrange(len(data))])
    second = build(**SMALL, **disk)
    assert together(second, prompts()) == expected
    tokens, cached = one_by_one(second, prompts())
    assert tokens == expected and sum(cached) > 0
    assert second.stats().kv_tiers["disk"].failed_blocks > 0


def test_a_disk_that_vanishes_leaves_an_engine_that_works(build, expected, disk, tmp_path):
    import shutil

    llm = build(**SMALL, **disk)
    one_by_one(llm, prompts()[:4])
    while (tmp_path / "kv").exists():  # the engine may write meanwhile
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    assert one_by_one(llm, prompts())[0] == expected
    llm.core.check()


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_new_weights_find_nothing_of_the_old_ones(tiers, build, folder, disk, tmp_path):
    llm = build(**SMALL, **(HOST if tiers == "host" else disk))
    old = one_by_one(llm, prompts())[0]
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_file(folder / "model.safetensors")[name]
    llm.update_weights_from_tensors({name: torch.zeros_like(weight)})
    new, cached = one_by_one(llm, prompts())
    assert new != old and cached == [0] * 9
    assert one_by_one(llm, prompts()) == (new, [96] * 9)
    llm.update_weights(str(folder))
    tokens, cached = one_by_one(llm, prompts())
    assert tokens == old
    assert cached.count(96 if tiers == "disk" else 0) >= 7, (
        "files are named after the weights' content; an update loses writes under way"
    )


def test_new_weights_without_their_folder_leave_an_engine_that_works(
    build, expected, disk, tmp_path, root, caplog
):
    import shutil

    llm = build(**SMALL, **disk)
    one_by_one(llm, prompts()[:2])
    llm.update_weights(str(tiny.write_model(root, "qwen3")))
    while (tmp_path / "kv").exists():
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    (tmp_path / "kv").write_text("a file")
    assert one_by_one(llm, prompts()[:3]) == (expected[:3], [0] * 3)
    assert "no longer kept" in caplog.text
    assert one_by_one(llm, prompts()[:3])[0] == expected[:3]


@pytest.mark.parametrize("level", [1, 2])
def test_host_memory_outlives_the_sleep_of_the_cache(level, build, root, expected):
    llm = build(**SMALL, **HOST, enable_sleep_mode=True)
    one_by_one(llm, prompts())
    llm.sleep(level=level)
    llm.wake_up()
    if level == 2:
        llm.update_weights(str(tiny.write_model(root, "qwen3")))
    tokens, cached = one_by_one(llm, prompts()[:6])
    assert tokens == expected[:6] and cached == [96 if level == 1 else 0] * 6
    llm.core.check()


def test_a_reset_forgets_every_tier_of_its_own(build, expected, disk, tmp_path):
    llm = build(**SMALL, **HOST, **disk)
    one_by_one(llm, prompts())
    assert llm.reset_prefix_cache()
    assert one_by_one(llm, prompts()) == (expected, [0] * 9)


@pytest.fixture
def gate(monkeypatch):
    """Files with blocks are read when it is set."""
    gate, load = threading.Event(), BlockFolder.load
    monkeypatch.setattr(BlockFolder, "load", lambda *args: load(*args) if gate.wait(20) else None)
    return gate


def second_engine(build, disk):
    """An engine whose disk tier has the prompts already."""
    first = build(**SMALL, **disk)
    one_by_one(first, prompts())
    first.exit()
    return build(**SMALL, **disk)


def start(llm, prompt, request_id, **options):
    llm.core.add(Request(request_id, prompt, params(**options)))


def test_others_run_while_a_prefix_is_on_its_way(build, expected, disk, gate):
    llm = second_engine(build, disk)
    start(llm, prompts()[0], "slow")
    for _ in range(3):
        assert llm.core.step() == []
    assert llm.stats().num_running == 1
    assert together(llm, [[1, 2, 3]]) == together(llm, [[1, 2, 3]])
    assert llm.stats().num_running == 1 and llm.stats().kv_tiers["disk"].fetched_blocks == 0
    gate.set()
    tokens, spans = [], []
    while llm.core.has_work:
        for output in llm.core.step():
            tokens += output.token_ids
            spans += output.spans or []
            assert output.num_cached_tokens == 96
    [queue, transfer, prefill] = spans
    assert (queue.name, transfer.name, prefill.name) == ("queue", "transfer", "prefill")
    assert transfer.attributes == {"from": "disk", "blocks": 6} and prefill.attributes == {"tokens": 4}
    assert queue.ago_s - queue.seconds == pytest.approx(transfer.ago_s), "it waits until its fetch begins"
    assert transfer.ago_s - transfer.seconds >= prefill.ago_s
    assert tokens == expected[0] and llm.stats().kv_tiers["disk"].fetched_blocks == 6


def test_a_request_may_leave_while_its_prefix_is_on_its_way(build, expected, disk, gate):
    llm = second_engine(build, disk)
    start(llm, prompts()[0], "slow")
    llm.core.step()
    llm.core.abort("slow")
    llm.core.check()
    assert llm.stats().num_free_blocks < 14
    gate.set()
    while llm.core.tick():
        time.sleep(0.001)
    assert llm.stats().num_free_blocks == 14
    assert one_by_one(llm, prompts()[:1]) == (expected[:1], [96])


def test_an_engine_may_end_while_a_prefix_is_on_its_way(build, disk, gate):
    llm = second_engine(build, disk)
    start(llm, prompts()[0], "slow")
    llm.core.step()
    threading.Timer(0.2, gate.set).start()
    llm.exit()
    llm.core.abort("slow")


@pytest.mark.parametrize("kept", [0, 2])
def test_blocks_that_go_between_their_look_up_and_their_fetch_are_computed(
    kept, build, expected, disk, monkeypatch
):
    llm, lookup = second_engine(build, disk), Offloader.lookup

    def evicted(self, keys, start):
        found = lookup(self, keys, start)
        self.persistent["disk"].forget(keys[start + kept :])  # by the tier's own threads, to make room
        return found

    monkeypatch.setattr(Offloader, "lookup", evicted)
    assert one_by_one(llm, prompts()[:2]) == (expected[:2], [16 * kept] * 2)
    llm.core.check()


def test_a_read_that_never_ends_delays_its_request_only(build, expected, disk, gate, monkeypatch):
    monkeypatch.setattr("shoal.engine.offload.fetch.PATIENCE_S", 0.2)
    llm = second_engine(build, disk)
    assert one_by_one(llm, prompts()[:2]) == (expected[:2], [0, 0])
    gate.set()


def test_an_interrupt_leaves_an_engine_that_works(build, expected, monkeypatch):
    llm = build(**SMALL, **HOST)
    one_by_one(llm, prompts())
    fetched, interrupts = Scheduler.fetched, [KeyboardInterrupt]

    def interrupted(self, fetch, num_blocks):
        if interrupts:
            raise interrupts.pop()
        fetched(self, fetch, num_blocks)

    monkeypatch.setattr(Scheduler, "fetched", interrupted)
    stored = llm.stats().kv_tiers["host"].stored_blocks
    with pytest.raises(KeyboardInterrupt):
        one_by_one(llm, prompts())
    assert llm.stats().kv_tiers["host"].stored_blocks >= stored > 0, "what counts since the start fell"
    assert one_by_one(llm, prompts())[0] == expected
    assert one_by_one(llm, prompts()) == (expected, [96] * 9)
    llm.core.check()


class Recorded:
    """Transfers that end at the next poll; whether they were to wait for steps in flight, and the copies out
    that copies in come after."""

    def __init__(self, num_slots, block_s=0.0):
        self.ready, self.block_s = list(range(num_slots)), block_s
        self.begun, self.waits, self.ordered, self.after, self.copied_out = [], [], [], [], []

    def copy_out(self, ids, _, wait):
        self.copied_out.append(ids)
        return self.begin(ids, wait)

    def begin(self, ids, wait):
        self.waits.append(wait)
        self.begun.append(Done(len(self.waits), [True] * len(ids), self.block_s * len(ids)))
        return len(self.waits)

    def copy_in(self, ids, _, wait, after):
        self.after.append(after)
        return self.begin(ids, wait)

    def order_after(self, ticket):
        self.ordered.append(ticket)

    def poll(self):
        ended, self.begun = self.begun, []
        return ended

    def take_ready(self):
        ready, self.ready = self.ready, []
        return ready


class Refused(Recorded):
    """No block can be written to the tiers below."""

    def write(self, tier, metas, host_blocks):
        self.waits.append(False)
        self.begun.append(Done(len(self.waits), [False] * len(metas)))
        return len(self.waits)

    def disown(self, tier, keys):
        pass


class Slow(Recorded):
    """Blocks are on their way to the tiers below until `end_writes`."""

    def __init__(self, num_slots):
        super().__init__(num_slots)
        self.tickets, self.writing = [], []

    def write(self, tier, metas, host_blocks):
        self.waits.append(False)
        self.tickets.append(Done(len(self.waits), [True] * len(metas)))
        self.writing += metas
        return len(self.waits)

    def end_writes(self):
        self.begun += self.tickets


def test_a_host_tier_whose_first_measurement_was_bad_is_used_after_one_request():
    """Regression: a copy that takes a tenth of the time of computing was measured while memory was being pinned, 25 times too slow. Six conversations continue, one after the other."""
    scheduler = Scheduler(
        num_blocks=20, block_size=2, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40
    )
    policy = offload_policy(watermark=20, max_leaving=99, copy_blocks=99)
    transfers = Recorded(200, block_s=0.002)
    costs = Costs(2, 0.01, {"host": 0.05})
    offloader = Offloader(scheduler, HostTier(200), transfers, {}, policy, costs)
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)

    def turn(conversation):
        """Returns how many of its 18 blocks come from host memory."""
        before = offloader.stats["host"].fetched_blocks
        scheduler.add(Request("one", [100 * conversation + i for i in range(37)], params()))
        for _ in range(10):
            offloader.poll()
            plan = scheduler.schedule()
            offloader.before_step(launches=plan is not None)
            if plan is not None:
                offloader.step_completed()
        scheduler.abort("one")
        offloader.offload(idle=True)
        offloader.poll()
        return offloader.stats["host"].fetched_blocks - before

    assert [turn(conversation) for conversation in range(6)] == [0] * 6
    assert turn(0) == 1, "a trial"
    assert [turn(conversation) for conversation in range(1, 6)] == [18] * 5
    offloader.check()


class Small:
    """An engine of three blocks without the rest of it. Its tokens are computed at once, or when
    `step_completed` says so."""

    def __init__(self):
        self.scheduler = scheduler = Scheduler(
            num_blocks=3, block_size=2, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=6
        )
        policy = offload_policy(watermark=3, always_fetch=True)
        self.transfers = Recorded(8)
        self.offloader = Offloader(
            scheduler, HostTier(8), self.transfers, {}, policy, Costs(2, 0.0, {"host": 0.0})
        )
        scheduler.blocks.fetches.sources.append(self.offloader)
        scheduler.blocks.pool.listeners.append(self.offloader)
        scheduler.blocks.watchers.append(self.offloader)

    def begin(self, request_id, prompt):
        self.scheduler.add(Request(request_id, prompt, params()))
        self.offloader.poll()
        plan = self.scheduler.schedule()
        self.offloader.before_step(launches=plan is not None)
        return plan

    def come_and_go(self):
        """a, whose blocks are copied out, and b, whose blocks, which it returns, are not."""
        for name, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9, 6])):
            assert self.begin(name, prompt) is not None
            blocks = self.scheduler.running[0].block_ids
            self.scheduler.abort(name)
            if name == "a":
                self.offloader.offload(idle=True)
        return blocks


@pytest.mark.parametrize("completed", [False, True])
def test_a_copy_waits_for_steps_in_flight_where_they_may_use_its_blocks(completed):
    small = Small()
    scheduler, offloader, begin = small.scheduler, small.offloader, small.begin
    assert begin("a", [1, 2, 3, 4, 5]) is not None
    scheduler.abort("a")
    offloader.offload(idle=True)
    assert offloader.transfers.waits == [True], "the step that writes these blocks is in flight"
    assert begin("b", [6, 7, 8, 9, 6]) is not None
    scheduler.abort("b")
    for _ in range(2 if completed else 1):
        offloader.step_completed()
    assert begin("c", [1, 2, 3, 4, 5]) is None and len(scheduler.blocks.fetches.under_way) == 1
    assert offloader.transfers.waits[1:] == [not completed] * 2, (
        "out with what b has left, in with what a had"
    )
    offloader.check()


def test_what_a_fetch_takes_and_nothing_below_has_is_copied_out_before():
    small = Small()
    small.come_and_go()
    assert small.begin("c", [1, 2, 3, 4, 5]) is None and len(small.scheduler.blocks.fetches.under_way) == 1
    assert small.transfers.after == [2], "the first copy out was of a's blocks, the second is of b's"
    small.scheduler.abort("c")
    assert small.begin("d", [6, 7, 8, 9, 6]) is None and small.transfers.after == [2, 0], (
        "its blocks are fetched, nothing was lost"
    )
    assert small.offloader.num_dropped == 0
    small.offloader.check()


@pytest.mark.parametrize("how", ["it leaves", "its blocks do not come"])
def test_nobody_gets_the_blocks_of_a_fetch_before_what_they_have_held_was_copied_out(how):
    small = Small()
    small.come_and_go()
    small.offloader.poll()
    poll, small.transfers.poll = small.transfers.poll, list  # nothing ends any more
    if how == "its blocks do not come":
        small.offloader.fetcher.begin = partial(begin_without_slots, small.offloader.fetcher)
    assert small.begin("c", [1, 2, 3, 4, 5]) is None
    assert small.transfers.waits[1:] and small.transfers.after == ([2] if how == "it leaves" else [])
    if how == "it leaves":
        small.scheduler.abort("c")
    assert small.begin("d", [3]) is None, "all blocks are still being read"
    small.scheduler.check()
    small.transfers.poll = poll
    small.offloader.poll()
    plan = small.scheduler.schedule()
    assert [entry.seq.request.request_id for entry in plan.scheduled] == (
        ["d"] if how == "it leaves" else ["c"]
    )
    small.offloader.check()
    small.scheduler.check()


def begin_without_slots(fetcher, fetch, where):
    """As if all its blocks had gone since the look-up."""
    keys, fetch.keys = fetch.keys, []
    job = type(fetcher).begin(fetcher, fetch, where)
    fetch.keys = keys
    return job


def test_what_hits_have_held_is_not_copied_out_when_a_step_is_about_to_write_them():
    """A short prompt and a long one with the same head start in one schedule: the long one's hits are blocks
    that the short one took."""
    scheduler = Scheduler(
        num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=16
    )
    policy = offload_policy(watermark=8)
    transfers = Recorded(32)
    offloader = Offloader(scheduler, HostTier(32), transfers, {}, policy, Costs(2, 0.0005, {"host": 0.0001}))
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)

    def step(**prompts):
        for name, prompt in prompts.items():
            scheduler.add(Request(name, prompt, params()))
        offloader.poll()
        plan = scheduler.schedule()
        offloader.before_step(launches=plan is not None)
        if plan is not None:
            offloader.step_completed()
        return plan

    step(long=[*range(1, 14)])
    scheduler.abort("long")
    offloader.offload(idle=True)
    step(other=[*range(101, 116)])
    scheduler.abort("other")
    transfers.copied_out.clear()
    plan = step(short=[1, 2, 3, 4, 5], again=[*range(1, 14)])
    assert [entry.seq.request.request_id for entry in plan.scheduled] == ["short"] and len(
        scheduler.blocks.fetches.under_way
    ) == 1
    [copied] = transfers.copied_out
    assert not set(copied) & set(plan.scheduled[0].seq.block_ids)
    offloader.check()


def test_where_not_all_can_be_saved_heads_are_rather_than_tails():
    small = Small()
    small.offloader.poll()
    small.offloader.host.take(5)  # room for three: two of a's, then one
    head = small.come_and_go()[0]
    small.transfers.copied_out.clear()
    assert small.begin("c", [1, 2, 3, 4, 5]) is None
    assert small.transfers.copied_out == [[head]] and small.offloader.num_dropped == 1


def test_a_block_whose_content_a_copy_inherits_is_not_rewritten_before_it_was_copied_out():
    """Two sequences compute the same; the block of the first is on its way out when that sequence leaves and
    its block is taken."""
    scheduler = Scheduler(
        num_blocks=4, block_size=2, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=6
    )
    policy = offload_policy(watermark=4, on_registration=True)
    transfers = Recorded(8)
    offloader = Offloader(scheduler, HostTier(8), transfers, {}, policy, Costs(2, 0.0, {"host": 0.0}))
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)
    for request_id, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 3])):
        scheduler.add(Request(request_id, prompt, params(skip_reading_prefix_cache=True)))
    offloader.poll()
    plan = scheduler.schedule()
    offloader.before_step(launches=True)
    copied = plan.scheduled[0].seq.block_ids[0]
    offloader.offload()
    assert offloader.transfers.begun and transfers.ordered == []
    scheduler.abort("a")
    scheduler.add(Request("c", [4, 5, 6], params()))
    plan = scheduler.schedule()
    assert copied in plan.scheduled[-1].seq.block_ids
    offloader.before_step(launches=True)
    assert transfers.ordered == [1]


def test_an_end_does_not_wait_for_a_disk_that_takes_nothing():
    scheduler = Scheduler(
        num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=16
    )
    policy = offload_policy(watermark=2)
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    costs = Costs(2, 0.0, {"host": 0.0, "disk": 0.0})
    tiers = {"disk": SimpleNamespace(contains=lambda key: False)}
    offloader = Offloader(scheduler, HostTier(2), Refused(2), tiers, policy, costs, clock)
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)
    scheduler.add(Request("a", list(range(13)), params()))
    offloader.poll()
    scheduler.schedule()
    scheduler.abort("a")
    assert len(scheduler.blocks.pool.cached_keys()) == 6, "more than the host has room for"
    assert offloader.flush(1000.0) > 0 and now[0] < 500
    assert offloader.stats["disk"].failed_blocks > 0
    offloader.check()


def test_an_interrupt_under_which_a_transfer_never_ends_ends_the_engine(build, monkeypatch):
    llm = build(**SMALL, **HOST)

    def never(self):
        raise TimeoutError

    def interrupted(self, waits):
        raise KeyboardInterrupt

    monkeypatch.setattr(RankKv, "abandon", never)
    monkeypatch.setattr(KvTiers, "after_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one_by_one(llm, prompts())
    with pytest.raises(EngineDeadError, match="did not end"):
        one_by_one(llm, prompts())


@pytest.mark.parametrize("error", [RuntimeError, EngineDeadError, KeyboardInterrupt])
def test_an_engine_that_cannot_write_its_blocks_at_the_end_ends_all_the_same(error, build, disk, monkeypatch):
    llm = build(**SMALL, **disk)

    def broken(self):
        raise error("no")

    monkeypatch.setattr(KvTiers, "flush", broken)
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else contextlib.nullcontext():
        llm.exit()
    with pytest.raises(EngineDeadError, match="was ended"):
        llm.generate(prompts(), params())


def test_a_block_that_waits_for_a_slow_disk_is_not_copied_out_again_nor_counted_as_lost():
    scheduler = Scheduler(
        num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=16
    )
    policy = offload_policy(has_host_tier=False, watermark=8)
    costs, transfers = Costs(2, 0.0, {"host": 0.0, "disk": 0.0}), Slow(64)
    tiers = {"disk": SimpleNamespace(contains=lambda key: False)}
    offloader = Offloader(scheduler, HostTier(64), transfers, tiers, policy, costs)
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)
    for name, first in (("a", 0), ("b", 100)):
        scheduler.add(Request(name, list(range(first, first + 13)), params()))
        offloader.poll()
        scheduler.schedule()
        offloader.before_step()
        scheduler.abort(name)
        for _ in range(5):
            offloader.tick()
    assert sum(map(len, transfers.copied_out)) == 12 and offloader.num_dropped == 0
    assert len(transfers.writing) == 12
    offloader.check()
    transfers.end_writes()
    offloader.poll()
    assert offloader.stats["disk"].stored_blocks == 12 and offloader.writer.num_left == 0
    offloader.check()


def test_blocks_leave_before_they_are_taken_however_quick_the_steps_are():
    """Regression: a scan that found few cold blocks was followed by the next after a tenth of a second, or when many blocks were evicted. Blocks that got cold in between were lost."""
    scheduler = Scheduler(
        num_blocks=1200, block_size=2, max_num_seqs=4, max_num_batched_tokens=99, max_model_len=32
    )
    policy = offload_policy(watermark=600, max_leaving=600)
    costs, transfers, looks = Costs(2, 0.0, {"host": 0.0}), Recorded(4000), []
    offloader = Offloader(scheduler, HostTier(4000), transfers, {}, policy, costs, clock=lambda: 100.0)
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)
    coldest = scheduler.blocks.pool.coldest
    scheduler.blocks.pool.coldest = lambda count: looks.append(count) or coldest(count)
    for i in range(300):
        scheduler.add(Request(str(i), list(range(32 * i, 32 * i + 21)), params()))
        offloader.poll()
        scheduler.schedule()
        offloader.before_step(launches=True)
        scheduler.abort(str(i))
        offloader.step_completed()
        offloader.offload()
    assert offloader.num_dropped == 0 and len(looks) <= 12


def test_while_nothing_may_leave_nobody_looks_for_what_might():
    now, looks = [100.0], []
    scheduler = Scheduler(
        num_blocks=16, block_size=2, max_num_seqs=4, max_num_batched_tokens=99, max_model_len=32
    )
    policy = offload_policy(block_bytes=10, watermark=16, bytes_per_s=40.0)
    costs = Costs(2, 0.0, {"host": 0.0})
    offloader = Offloader(scheduler, HostTier(16), Recorded(16), {}, policy, costs, clock=lambda: now[0])
    scheduler.blocks.fetches.sources.append(offloader)
    scheduler.blocks.pool.listeners.append(offloader)
    scheduler.blocks.watchers.append(offloader)
    coldest = scheduler.blocks.pool.coldest
    scheduler.blocks.pool.coldest = lambda count: looks.append(now[0]) or coldest(count)
    scheduler.add(Request("a", list(range(21)), params()))
    offloader.poll()
    scheduler.schedule()
    scheduler.abort("a")
    while offloader.host.num_blocks < 10:
        offloader.poll()
        offloader.offload()
        now[0] += 0.01
        assert now[0] < 110
    assert now[0] > 102 and len(looks) <= 26


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_prefix_is_fetched_only_where_that_is_quicker(is_quick, build, expected, monkeypatch):
    """No prompt here is long enough to change the estimate of prefill speed."""
    token_s, block_s = (1.0, 1e-6) if is_quick else (1e-9, 1.0)
    monkeypatch.setattr(start_up, "seconds_per_prompt_token", lambda runner: token_s)
    monkeypatch.setattr(RankKv, "measure_block", lambda self: block_s)
    llm = build(**SMALL | dict(kv_load_policy="cost", max_num_batched_tokens=2048), **HOST)
    one_by_one(llm, prompts())
    one_by_one(llm, prompts()[:1])  # a tier that looks slow is tried once
    assert one_by_one(llm, prompts()[1:2]) == (expected[1:2], [96 if is_quick else 0])
    assert llm.stats().kv_tiers["host"].trial_fetches == (0 if is_quick else 1)


def test_what_came_once_may_be_left_out(build):
    llm = build(**SMALL, **HOST, kv_offload_min_uses=2)
    one_by_one(llm, prompts())
    assert llm.stats().kv_tiers["host"].stored_blocks == 0 and llm.stats().kv_dropped_blocks > 30
    one_by_one(llm, prompts())
    assert one_by_one(llm, prompts())[1] == [96] * 9


def test_beyond_the_bandwidth_blocks_are_dropped_and_counted(build, expected):
    llm = build(**SMALL, **HOST, kv_offload_bandwidth=1)
    assert one_by_one(llm, prompts())[0] == expected
    stats = llm.stats()
    assert stats.kv_tiers["host"].stored_blocks <= 1 and stats.kv_dropped_blocks > 30


def test_listeners_hear_of_every_tier(build, disk):
    llm = build(
        **SMALL,
        **HOST,
        **disk,
        kv_offload_policy="register",
        kv_events_config=dict(enable_kv_cache_events=True, publisher="null"),
    )
    one_by_one(llm, prompts()[:3])
    while llm.core.tick():
        time.sleep(0.001)
    llm.core.tick()
    media = {event.medium for batch in llm.drain_kv_events() for event in batch.events}
    assert media == {"GPU", "CPU", "STORAGE"}


@pytest.mark.parametrize(
    "options",
    [
        dict(kv_host_bytes=-1),
        dict(kv_host_bytes=True),
        dict(kv_host_bytes=1 << 60),
        dict(kv_host_bytes=100),
        dict(kv_disk_bytes=1 << 20),
        dict(kv_disk_path="/tmp/kv"),
        dict(kv_disk_path="", kv_disk_bytes=1),
        dict(kv_disk_path="/proc/nowhere", kv_disk_bytes=1 << 30),
        dict(kv_offload_policy="never"),
        dict(kv_load_policy="sometimes"),
        dict(kv_eviction_policy="mru"),
        dict(kv_offload_min_uses=0),
        dict(kv_offload_bandwidth=0),
        dict(kv_flush_timeout=-1.0),
        dict(kv_flush_timeout=float("inf")),
        dict(kv_host_bytes=1 << 20, enable_prefix_caching=False),
        dict(kv_store="nonsense://x"),
    ],
    ids=str,
)
def test_impossible_options_are_refused_by_name(options, folder):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        LLM(str(folder), device="cpu", max_model_len=192, num_gpu_blocks_override=14, **options)


@pytest.mark.parametrize("option", ["kv_host_bytes", "kv_disk_path"])
def test_host_memory_that_cannot_be_had_is_an_error_that_says_what_to_do(option, build, disk, monkeypatch):
    def nothing(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr("shoal.engine.runner.rank_kv.HostSlab", nothing)
    with pytest.raises(ConfigError, match=f"{option}.*no memory"):
        build(**SMALL, **(HOST if option == "kv_host_bytes" else disk))


def test_a_slab_of_which_nothing_can_be_pinned_is_refused(monkeypatch):
    """Else every request would wait for slots that never come."""
    asked = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: asked.append(_) or 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr("shoal.memory.slab.forget_last_error", lambda: None)
    with pytest.raises(MemoryError, match="pinned"):
        HostSlab(64, 4 << 20, torch.device("cuda"))
    assert len(asked) == 1


def test_the_rest_of_a_slab_is_pinned_when_told_so_that_nothing_disturbs_the_first_measurement(monkeypatch):
    pinned = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0,
        cudaHostUnregister=lambda address: 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("shoal.memory.slab.CHUNK_BYTES", 1 << 20)
    slab = HostSlab(64, 1 << 16, torch.device("cuda"))
    assert slab.take_ready() == [(0, 16)] and pinned == [1 << 20]
    slab.pin_rest()
    ready = []
    while len(ready) < 3:
        ready += slab.take_ready()
        time.sleep(0.001)
    assert sorted(ready) == [(16, 32), (32, 48), (48, 64)]
    slab.close()


def test_options_of_tiers_are_flags_of_the_command():
    from shoal.cli.main import build_parser

    given = build_parser().parse_args(
        [
            "serve",
            "m",
            "--kv-host-bytes",
            "5",
            "--kv-disk-path",
            "/x",
            "--kv-disk-bytes",
            "7",
            "--kv-store",
            "memory://",
            "--kv-offload-policy",
            "register",
            "--kv-load-policy",
            "always",
        ]
    )
    assert (given.kv_host_bytes, given.kv_disk_path, given.kv_disk_bytes, given.kv_store) == (
        5,
        "/x",
        7,
        "memory://",
    )
    assert not EngineConfig().has_kv_tiers
