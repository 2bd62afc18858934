"""Fetches of sequences with several tables of blocks: from lower tiers (a real Offloader over simulated copies) and
from other workers, who have blocks with tails. The simulated device of test_grouped_blocks.py finds at each position
that a token sees the content of that very prefix. A failing seed is in the test's output; `trace(seed)` repeats it."""

import random
from collections import Counter

import pytest

from shoal.api import Request
from shoal.engine.offload.costs import Costs
from shoal.engine.offload.offloader import Offloader, OffloadPolicy
from shoal.engine.offload.transfers import Done
from shoal.engine.peers.prefetches import Prefetches
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.hashing import extend_keys, keys_with_tail
from shoal.kv.groups import LayerGroup
from shoal.kv.places import key_of, places
from shoal.kv.tiers.host import HostTier
from shoal.sampling_params import SamplingParams
from tests.cpu.engine.test_grouped_blocks import VOCAB, Device, random_groups
from tests.seeded import prints_its_seed

TRACES_A_TEST = 60


class FakeDisk:
    must_be_asked = False

    def __init__(self):
        self.blocks: dict[bytes, tuple] = {}

    def contains(self, key):
        return key in self.blocks


class FakeTransfers:
    """Copies out see the blocks as they are at their beginning; all other transfers happen when they are polled."""

    def __init__(self, r, device, num_host_blocks, disk):
        self.r, self.device, self.disk = r, device, disk
        self.host: dict[int, dict] = {}
        self.unready = list(range(num_host_blocks))
        self.queue: list[tuple[int, int, object]] = []
        self.last = 0

    def _begin(self, count, move):
        self.last += 1
        self.queue.append((self.last, count, move))
        return self.last

    def copy_out(self, blocks, host_blocks, wait):
        contents = [self.device.content(block) for block in blocks]

        def move():
            self.host.update(zip(host_blocks, contents))
            return [True] * len(blocks)

        return self._begin(len(blocks), move)

    def copy_in(self, host_blocks, blocks, wait, after):
        def move():
            for host_block, block in zip(host_blocks, blocks):
                self.device.fill(block, self.host[host_block])
            return [True] * len(blocks)

        return self._begin(len(blocks), move)

    def write(self, tier, metas, host_blocks):
        def move():
            for meta, host_block in zip(metas, host_blocks):
                self.disk.blocks[meta.key] = meta, self.host[host_block]
            return [True] * len(metas)

        return self._begin(len(metas), move)

    def read(self, tier, metas, host_blocks):
        def move():
            intact = []
            for meta, host_block in zip(metas, host_blocks):
                found = self.disk.blocks.get(meta.key)
                intact.append(found is not None and self.r.random() < 0.95)
                if intact[-1]:
                    assert found[0] == meta, "another block under this key"
                    self.host[host_block] = found[1]
            return intact

        return self._begin(len(metas), move)

    def order_after(self, ticket):
        pass

    def disown(self, tier, keys):
        for key in keys:
            self.disk.blocks.pop(key, None)

    def poll(self):
        ended = [entry for entry in self.queue if self.r.random() < 0.6]
        self.queue = [entry for entry in self.queue if entry not in ended]
        return [Done(ticket, move(), 0.001) for ticket, _, move in ended]

    def take_ready(self):
        ready, self.unready = self.unready, []
        return ready


class FetchingDevice(Device):
    def content(self, block):
        return {offset: value for (at, offset), value in self.memory.items() if at == block}

    def fill(self, block, content):
        self.memory = {place: value for place, value in self.memory.items() if place[0] != block}
        self.memory |= {(block, offset): value for offset, value in content.items()}


class Elsewhere:
    """Other workers, which have the blocks that a sequence needs to continue after some prompts."""

    def __init__(self, r, device, groups, size, seen):
        self.r, self.device, self.groups, self.size, self.seen = r, device, groups, size, seen
        self.blocks: dict[bytes, dict] = {}
        self.begun = []

    def compute(self, seq, token_ids):
        keys = []
        extend_keys(keys, seq.root, token_ids, self.size)
        chain = keys_with_tail(keys, seq.root, token_ids, self.size)
        for place in places(self.groups, len(token_ids)):
            own = self.groups[place.group].block_size
            positions = range(place.number * own, min((place.number + 1) * own, len(token_ids)))
            self.blocks[key_of(place, self.groups, chain, self.size)] = {
                position % own: (place.group, tuple(token_ids[: position + 1])) for position in positions
            }

    def has(self, key):
        return key in self.blocks

    def lookup(self, keys, start, num_tokens):
        assert num_tokens > 0
        if not all(key in self.blocks for key in keys[start:]):
            self.seen["holes"] += 1
            return 0
        return len(keys) - start

    def begin(self, fetch):
        self.begun.append(fetch)

    def end_some(self, scheduler):
        for fetch in list(self.begun):
            if self.r.random() < 0.4:
                self.begun.remove(fetch)
                num = len(fetch.keys) if self.r.random() < 0.8 else self.r.randint(0, len(fetch.keys))
                for i, (key, block) in enumerate(zip(fetch.keys, fetch.blocks)):
                    self.device.fill(block, self.blocks[key] if i < num else {0: "garbage"})
                self.seen["whole"] += num == len(fetch.keys)
                self.seen["parts"] += num < len(fetch.keys)
                self.seen["tails"] += num == len(fetch.keys) and fetch.end % self.size > 0
                scheduler.fetched(fetch, num)


class Tiers:
    """The Offloader as a part of the engine."""

    def __init__(self, offloader, seen):
        self.offloader, self.seen = offloader, seen

    def lookup(self, keys, start, num_tokens):
        return self.offloader.lookup(keys, start, num_tokens)

    def has(self, key):
        return self.offloader.has(key)

    def begin(self, fetch):
        self.seen["from tiers"] += 1
        self.offloader.begin(fetch)

    def registered(self, seq, start, blocks, group):
        self.offloader.registered(seq, start, blocks, group)

    def released(self, blocks):
        self.offloader.released(blocks)


@prints_its_seed
def trace(seed: int) -> Counter[str]:
    r = random.Random(seed)
    size = r.choice((1, 2, 4))
    groups = random_groups(r, size)
    num_blocks = r.randint(6 * len(groups), 12 * len(groups) + 60 // size)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=r.randint(1, 5),
        max_num_batched_tokens=r.choice((5, 8, 16, 64)),
        max_model_len=60,
        groups=groups,
    )
    device, seen, in_flight = FetchingDevice(groups), Counter[str](), []
    disk = FakeDisk()
    num_host_blocks = r.choice((8, 100))
    has_host_tier = r.random() < 0.6
    policy = OffloadPolicy(
        size,
        10,
        has_host_tier,
        watermark=r.randint(1, num_blocks),
        host_watermark=r.randint(1, 8),
        max_leaving=100,
        copy_blocks=r.choice((1, 100)),
        on_registration=r.random() < 0.3,
        always_fetch=r.random() < 0.8,
    )
    transfers = FakeTransfers(r, device, num_host_blocks, disk)
    costs = Costs(size, 0.01, {"host": 0.001, "disk": 0.002})
    offloader = Offloader(
        scheduler,
        HostTier(num_host_blocks),
        transfers,
        {"disk": disk} if r.random() < 0.7 or not has_host_tier else {},
        policy,
        costs,
    )
    tiers, elsewhere = Tiers(offloader, seen), Elsewhere(r, device, groups, size, seen)
    prefetches = Prefetches(scheduler)
    scheduler.gates.append(prefetches)
    scheduler.reserves.append(prefetches)
    scheduler.blocks.fetches.sources[:] = r.choice(([tiers], [elsewhere], [tiers, elsewhere]))
    scheduler.blocks.watchers.append(tiers)
    scheduler.blocks.pool.listeners.append(offloader)
    prompts: list[list[int]] = []

    def add():
        base = r.choice(prompts)[: r.randint(0, 50)] if prompts and r.random() < 0.8 else []
        if prompts and r.random() < 0.2:
            base = r.choice(prompts)
        prompt = (base + [r.randrange(VOCAB) for _ in range(r.randint(1, 12))])[:50]
        if len(prompt) + 1 >= scheduler.blocks.room:
            return
        name, params = f"r{len(prompts)}", SamplingParams(max_tokens=r.randint(2, 10), ignore_eos=True)
        prompts.append(prompt)
        first = [r.randrange(VOCAB)]
        if elsewhere in scheduler.blocks.fetches.sources and r.random() < 0.4:
            ahead = Request(
                f"f{name}", prompt, SamplingParams(max_tokens=1), fetches_only=True, kv_ticket=b"x"
            )
            seq = scheduler.add(ahead)
            prefetches.added(seq)
            elsewhere.compute(seq, prompt)
            behind = Request(name, prompt, params, output_token_ids=first, continues=f"f{name}")
            seq = scheduler.add(behind)
            prefetches.added(seq)
            seen["prefetches"] += 1
        else:
            seq = scheduler.add(Request(name, prompt, params))
            if r.random() < 0.5:
                elsewhere.compute(seq, prompt[: r.randint(1, len(prompt))])

    def step():
        offloader.poll()
        elsewhere.end_some(scheduler)
        prefetches.before_schedule()
        if len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            offloader.before_step(launches=True)
            prefetches.after_schedule(plan)
            in_flight.append((plan, device.run(plan)))
            seen["fetched tokens"] += sum(entry.begins and entry.start > 0 for entry in plan.scheduled)
        else:
            offloader.before_step()
            prefetches.after_schedule(None)
            if in_flight:
                plan, sampled = in_flight.pop(0)
                offloader.step_completed()
                scheduler.update(plan, sampled)
        offloader.offload(idle=r.random() < 0.5)
        scheduler.check()
        scheduler.blocks.check_held(prefetches.held_blocks())
        offloader.check()
        for held in list(prefetches._held):
            if r.random() < 0.05:
                prefetches.aborted(held)

    for _ in range(250):
        if r.random() < 0.15 and len(scheduler.waiting) < 4:
            add()
        if r.random() < 0.02 and (scheduler.running or scheduler.waiting):
            scheduler.abort(r.choice([*scheduler.running, *scheduler.waiting]).request.request_id)
        if r.random() < 0.01:
            scheduler.reset_prefix_cache()
            prefetches.after_reset()
        if disk.blocks and r.random() < 0.02:
            del disk.blocks[r.choice(list(disk.blocks))]
        step()
    for _ in range(3000):
        if not scheduler.has_work and not in_flight and not prefetches._held and not elsewhere.begun:
            break
        step()
        for held in list(prefetches._held):
            if not scheduler.has_work:
                prefetches.aborted(held)
    assert not scheduler.has_work, "sequences that do not end"
    for _ in range(20):
        offloader.tick()
    seen["preempted"] += scheduler.stats().num_preemptions
    seen["hits of tiers and workers"] += scheduler.stats().external_prefix_cache_hits
    scheduler.check()
    assert scheduler.blocks.pool.num_free == num_blocks
    return seen


@pytest.mark.parametrize("first_seed", [0, pytest.param(TRACES_A_TEST, marks=pytest.mark.slow)])
def test_whatever_comes_from_tiers_and_workers_every_token_sees_its_own_prefix(first_seed):
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    for name in (
        "from tiers",
        "whole",
        "parts",
        "tails",
        "prefetches",
        "preempted",
        "hits of tiers and workers",
    ):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


def test_a_sequence_whose_fetch_failed_counts_once_in_the_prefix_cache():
    """Regression: it was counted again when it started again."""
    groups = (LayerGroup((), 4), LayerGroup((), 4, 6))
    scheduler = Scheduler(
        num_blocks=40,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=60,
        groups=groups,
    )
    source = Elsewhere(random.Random(0), FetchingDevice(groups), groups, 4, Counter())
    scheduler.blocks.fetches.sources.append(source)
    prompt = list(range(30))
    source.compute(scheduler.add(Request("a", prompt, SamplingParams(max_tokens=2))), prompt[:24])
    assert scheduler.schedule() is None
    (fetch,) = source.begun
    scheduler.fetched(fetch, len(fetch.keys) - 1)
    assert scheduler.schedule().scheduled[0].begins
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (30, 0)
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (30, 0)
