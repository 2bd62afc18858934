"""Sequences with recurrent states: a simulated device copies and advances the states of rows, and checks that each
step begins with the state of that very prefix. A failing seed is in the test's output; `trace(seed)` repeats it."""

import random
from collections import Counter

import pytest

from shoal.api import Request
from shoal.engine.scheduling import state_blocks
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.state_blocks import SnapshotRoom
from shoal.kv.groups import LayerGroup
from shoal.sampling_params import SamplingParams
from tests.cpu.engine.test_grouped_blocks import Device

TRACES_A_TEST = 60
VOCAB = 4


class StateDevice(Device):
    """Rows and blocks: a row has the tokens that its state stands for. So has each part of a snapshot, in the
    memory of the block that it lies in."""

    def __init__(self, groups):
        super().__init__(groups)
        self.rows: dict[int, tuple[int, ...]] = {}
        self.sizes = Counter()

    def run(self, plan):
        copies = plan.copies
        for row, blocks in copies.restores if copies else ():
            contents = [self.memory.get((block, 0)) for block in blocks]
            assert [part for part, _ in contents] == [*range(len(blocks))], "parts out of order"
            assert len(set(state for _, state in contents)) == 1, "parts of several snapshots"
            self.rows[row] = contents[0][1]
            self.sizes["restores"] += 1
        starts = [(entry, [] if entry.start == 0 else list(self.rows[entry.row])) for entry in plan.scheduled]
        rows = [entry.row for entry in plan.scheduled]
        assert len(rows) == len(set(rows))
        sampled = super().run(plan)
        for entry, state in starts:
            known = self.tokens[entry.seq.request.request_id]
            assert state == known[: entry.start], "a row has the state of another prefix"
            self.rows[entry.row] = tuple(known[: entry.start + entry.num_tokens])
        for row, blocks in copies.saves if copies else ():
            for i, block in enumerate(blocks):
                self.memory[block, 0] = i, self.rows[row]
            self.sizes["saves"] += 1
        return sampled


def random_groups(r, size):
    windows = r.choice(((None,), (None,), (None, 3), (5,), (2, 7), (None, None, 4)))
    return tuple(LayerGroup((), size * r.choice((1, 1, 2)), window) for window in windows)


def trace(seed, steps=250):
    try:
        return run_trace(seed, steps)
    except BaseException:
        print(f"failed: trace({seed}, {steps})")
        raise


def run_trace(seed, steps):
    r = random.Random(seed)
    size = r.choice((1, 2, 4))
    groups = random_groups(r, size)
    num_blocks = r.randint(4 * len(groups), 16 * len(groups) + 80 // size)
    room = SnapshotRoom(r.choice((1, 2, 5)), r.choice((0, 0, 20)))
    caching, depth = r.random() < 0.9, r.choice((1, 2, 2, 4))
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=r.randint(1, 5),
        max_num_batched_tokens=r.choice((5, 8, 16, 64)),
        max_model_len=60,
        enable_prefix_caching=caching,
        groups=groups,
        snapshots=room,
    )
    device, seen, in_flight = StateDevice(groups), Counter[str](), []
    prompts: list[list[int]] = []
    for _ in range(steps):
        if r.random() < 0.15 and len(scheduler.waiting) < 4:
            base = r.choice(prompts[-20:])[: r.randint(0, 50)] if prompts and r.random() < 0.8 else []
            prompt = (base + [r.randrange(VOCAB) for _ in range(r.randint(1, 12))])[:50]
            if len(prompt) < scheduler.blocks.room:
                params = SamplingParams(
                    max_tokens=r.randint(1, 10),
                    ignore_eos=True,
                    prompt_logprobs=0 if r.random() < 0.05 else None,
                )
                scheduler.add(Request(f"r{len(prompts)}", prompt, params))
                prompts.append(prompt)
        if r.random() < 0.02 and (scheduler.running or scheduler.waiting):
            scheduler.abort(r.choice([*scheduler.running, *scheduler.waiting]).request.request_id)
        if r.random() < 0.005:
            scheduler.reset_prefix_cache()
            seen["resets"] += 1
        if r.random() < 0.003 and not in_flight:
            scheduler.preempt_all()
        if len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
            seen["hits"] += sum(entry.begins and entry.start > 0 for entry in plan.scheduled)
            in_flight.append((plan, device.run(plan)))
        elif in_flight:
            plan, sampled = in_flight.pop(0)
            for result in scheduler.update(plan, sampled):
                if result.finish_reason is not None:
                    seen["finished"] += 1
                    prompts.append(result.seq.token_ids[:48])
        elif scheduler.running:
            raise AssertionError("nothing can run, though sequences have begun")
        scheduler.check()
    waits = 0
    while scheduler.has_work or in_flight:
        if len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
            in_flight.append((plan, device.run(plan)))
        else:
            assert in_flight, "no sequence can run"
            scheduler.update(*in_flight.pop(0))
        waits += 1
        assert waits < 20_000, "sequences that make no progress"
    seen["preempted"] += scheduler.stats().num_preemptions
    scheduler.check()
    stats = scheduler.stats()
    assert stats.num_free_blocks == num_blocks and stats.num_free_snapshots >= stats.num_snapshots
    scheduler.reset_prefix_cache()
    assert scheduler.blocks.pool.num_free == num_blocks
    return seen + device.sizes


@pytest.mark.parametrize("first_seed", [0, pytest.param(TRACES_A_TEST, marks=pytest.mark.slow)])
def test_every_step_begins_with_the_state_of_its_own_prefix(first_seed, monkeypatch):
    monkeypatch.setattr(state_blocks, "CUT_TOKENS", 6)
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    for name in ("hits", "finished", "preempted", "restores", "saves", "resets"):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"
