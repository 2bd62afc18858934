"""Snapshots of recurrent states go to host memory and come back with the KV before them: the simulated device of
test_state_blocks.py finds in each row the state of that very prefix. A failing seed is in the test's output;
`trace(seed)` repeats it."""

import random
from collections import Counter

import pytest

from shoal.api import Request
from shoal.engine.offload.costs import Costs
from shoal.engine.offload.offloader import Offloader, OffloadPolicy
from shoal.engine.scheduling import state_blocks
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.state_blocks import SnapshotRoom
from shoal.kv.tiers.host import HostTier
from shoal.sampling_params import SamplingParams
from tests.cpu.engine.test_grouped_fetches import FakeDisk, FakeTransfers, FetchingDevice, Tiers
from tests.cpu.engine.test_state_blocks import SEE_ALL, VOCAB, StateDevice, random_groups, tokens
from tests.seeded import prints_its_seed

TRACES_A_TEST = 60


class FetchingStateDevice(StateDevice, FetchingDevice):
    pass


class KeptTiers(Tiers):
    def kept(self, seq, end):
        pass


def with_tiers(r, scheduler, groups, num_host_blocks, seen, has_host_tier=True, has_disk=False, **options):
    """Returns a device and an offloader with these tiers, which the scheduler uses."""
    device, blocks, disk = FetchingStateDevice(groups), scheduler.blocks, FakeDisk()
    transfers = FakeTransfers(r, device, num_host_blocks, disk)
    defaults = {
        "watermark": blocks.pool.num_blocks,
        "host_watermark": 1,
        "max_leaving": 100,
        "copy_blocks": 100,
    }
    policy = OffloadPolicy(blocks.block_size, 10, has_host_tier, **defaults | options)
    costs = Costs(blocks.block_size, 0.01, {"host": 0.001, "disk": 0.002})
    below = {"disk": disk} if has_disk else {}
    offloader = Offloader(scheduler, HostTier(num_host_blocks), transfers, below, policy, costs)
    tiers = KeptTiers(offloader, seen)
    blocks.fetches.sources[:] = [tiers]
    blocks.watchers.append(tiers)
    blocks.pool.listeners.append(offloader)
    return device, offloader


def step(scheduler, device, offloader, in_flight, seen, depth=2):
    """Runs one turn of the engine's loop; returns whether anything was left to do."""
    offloader.poll()
    if len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
        offloader.before_step(launches=True)
        in_flight.append((plan, device.run(plan)))
        seen["hits"] += sum(entry.begins and entry.start > 0 for entry in plan.scheduled)
    else:
        offloader.before_step()
        if in_flight:
            plan, sampled = in_flight.pop(0)
            offloader.step_completed()
            for result in scheduler.update(plan, sampled):
                seen["finished"] += result.finish_reason is not None
    offloader.offload(idle=True)
    scheduler.check()
    offloader.check()
    return scheduler.has_work or bool(in_flight)


@prints_its_seed
def trace(seed):
    r = random.Random(seed)
    size = r.choice((1, 2, 4))
    groups = random_groups(r, size)
    num_blocks = r.randint(6 * len(groups), 12 * len(groups) + 60 // size)
    room = SnapshotRoom(r.choice((1, 2, 4)), r.choice((0, 0, 12)))
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=r.randint(1, 5),
        max_num_batched_tokens=r.choice((5, 8, 16, 64)),
        max_model_len=60,
        groups=groups,
        snapshots=room,
    )
    seen, in_flight = Counter[str](), []
    options = {"on_registration": r.random() < 0.3, "always_fetch": r.random() < 0.8}
    options["has_host_tier"] = r.random() < 0.7
    options["has_disk"] = not options["has_host_tier"] or r.random() < 0.5
    options |= {"copy_blocks": r.choice((1, 3, 100)), "max_leaving": r.choice((2, 100))}
    device, offloader = with_tiers(r, scheduler, groups, r.choice((12, 300)), seen, **options)
    prompts: list[list[int]] = []
    for _ in range(300):
        if r.random() < 0.15 and len(scheduler.waiting) < 4:
            base = r.choice(prompts)[: r.randint(0, 50)] if prompts and r.random() < 0.9 else []
            prompt = (base + [r.randrange(VOCAB) for _ in range(r.randint(1, 12))])[:50]
            if len(prompt) + 1 < scheduler.blocks.room:
                params = SamplingParams(max_tokens=r.randint(1, 10), ignore_eos=True)
                scheduler.add(Request(f"r{len(prompts)}", prompt, params))
                prompts.append(prompt)
        if r.random() < 0.02 and (scheduler.running or scheduler.waiting):
            scheduler.abort(r.choice([*scheduler.running, *scheduler.waiting]).request.request_id)
        if r.random() < 0.01:
            scheduler.reset_prefix_cache()
        step(scheduler, device, offloader, in_flight, seen, r.choice((1, 2)))
    for _ in range(5000):
        if not step(scheduler, device, offloader, in_flight, seen) and not scheduler.blocks.fetches.under_way:
            break
    else:
        raise AssertionError("the traces do not end")
    offloader.quiesce()
    scheduler.check()
    scheduler.reset_prefix_cache()
    assert scheduler.blocks.pool.num_free == num_blocks
    return seen + device.sizes


@pytest.mark.parametrize("first_seed", [0, pytest.param(TRACES_A_TEST, marks=pytest.mark.slow)])
def test_states_come_back_with_their_prefix(first_seed, monkeypatch):
    monkeypatch.setattr(state_blocks, "CUT_TOKENS", 6)
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    for name in ("hits", "finished", "restores", "from tiers"):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


@pytest.mark.parametrize("beside", [0, 40])
def test_conversations_that_do_not_fit_on_the_device_go_on_from_host_memory(beside):
    """Eight conversations take turns in room for two. No turn computes more than its own tokens and a block."""
    r, seen = random.Random(0), Counter[str]()
    scheduler = Scheduler(
        num_blocks=40,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        groups=SEE_ALL,
        snapshots=SnapshotRoom(3, beside),
    )
    device, offloader = with_tiers(r, scheduler, SEE_ALL, 1000, seen)
    known = [tokens(100, seed=i) for i in range(8)]
    for turn in range(3):
        for i in range(8):
            old = len(known[i])
            prompt = known[i] + tokens(20, seed=100 * turn + i) if turn else known[i]
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            seq, in_flight = scheduler.add(Request(f"{turn}.{i}", prompt, params)), []
            while step(scheduler, device, offloader, in_flight, seen):
                pass
            if turn:
                assert old - 16 <= seq.num_cached_tokens <= old, (turn, i)
            known[i] = seq.token_ids
    assert seen["from tiers"] >= 14
