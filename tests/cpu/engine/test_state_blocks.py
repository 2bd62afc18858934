"""Sequences with recurrent states: a simulated device copies and advances the states of rows, and checks that each
step begins with the state of that very prefix. A failing seed is in the test's output; `trace(seed)` repeats it."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from shoal.api import Request
from shoal.engine.scheduling import state_blocks
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.state_blocks import SnapshotRoom
from shoal.kv.groups import LayerGroup
from shoal.sampling_params import SamplingParams
from tests.cpu.engine.test_grouped_blocks import Device
from tests.seeded import prints_its_seed

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
        own = {}
        for entry, state in starts:
            known = self.tokens[entry.seq.request.request_id]
            assert state == known[: entry.start], "a row has the state of another prefix"
            self.rows[entry.row] = tuple(known[: entry.start + entry.num_tokens])
            own[entry.row] = entry
        # Regression: a snapshot made room for another one of the same step, whose copies run side by side.
        saved = [block for _, blocks in copies.saves for block in blocks] if copies else []
        assert len(saved) == len(set(saved)), "a block is saved to twice in a step"
        for s, (row, blocks) in enumerate(copies.saves if copies else ()):
            end = copies.ends[s] if copies.ends is not None and copies.ends[s] else len(self.rows[row])
            if own[row].start < end <= len(self.rows[row]):
                for i, block in enumerate(blocks):
                    self.memory[block, 0] = i, self.rows[row][:end]
                self.sizes["saves"] += 1
            else:
                self.sizes["saves that are not due"] += 1
        return sampled


class DraftDevice(StateDevice):
    """Decodes sample up to `num_tokens` tokens, and begin where the last ones ended, as the device alone knows."""

    def __init__(self, groups, r):
        super().__init__(groups)
        self.r = r

    def run(self, plan):
        entries, drawn = [], []
        for i, entry in enumerate(plan.scheduled):
            start, count, samples = entry.start, entry.num_tokens, entry.samples
            known = self.tokens.setdefault(entry.seq.request.request_id, list(entry.seq.token_ids))
            if i < plan.num_decodes:
                assert len(known) - 1 <= start
                start, count, samples = len(known) - 1, self.r.randint(1, count), False
                for _ in range(count):
                    known.append(hash(tuple(known)) % VOCAB)
                drawn.append(known[-count:])
                self.sizes["drafts"] += count > 1
            entries.append(
                SimpleNamespace(seq=entry.seq, row=entry.row, start=start, num_tokens=count, samples=samples)
            )
        return drawn + super().run(SimpleNamespace(scheduled=entries, copies=plan.copies))


def random_groups(r, size):
    windows = r.choice(((None,), (None,), (None, 3), (5,), (2, 7), (None, None, 4)))
    return tuple(LayerGroup((), size * r.choice((1, 1, 2)), window) for window in windows)


@prints_its_seed
def trace(seed, steps=250, queries=1):
    r = random.Random(seed)
    size = r.choice((1, 2, 4))
    groups = random_groups(r, size)
    num_blocks = r.randint(4 * len(groups), 16 * len(groups) + 80 // size)
    room = SnapshotRoom(r.choice((1, 2, 5)), r.choice((0, 0, 20)), drafts=queries > 1)
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
        queries=queries,
    )
    device = StateDevice(groups) if queries == 1 else DraftDevice(groups, r)
    seen, in_flight = Counter[str](), []
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


@pytest.mark.parametrize("queries", [2, 5, 9])
def test_snapshots_hold_no_draft_that_was_rejected(queries, monkeypatch):
    """The host knows one step late how many tokens a step computed, and blocks have 1 to 8 tokens."""
    monkeypatch.setattr(state_blocks, "CUT_TOKENS", 6)
    print(f"seeds 3000..{2999 + TRACES_A_TEST}, decodes of up to {queries} tokens")
    seeds = range(3000, 3000 + TRACES_A_TEST)
    seen = sum((trace(seed, queries=queries) for seed in seeds), Counter[str]())
    for name in ("hits", "finished", "preempted", "restores", "saves", "saves that are not due", "drafts"):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


SEE_ALL = (LayerGroup((0,), 16),)


class Engine:
    """Asks a scheduler for one answer after another, with a step in flight or none, on a simulated device."""

    def __init__(self, num_blocks=100, groups=SEE_ALL, room=None, depth=2, **options):
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 1024, "block_size": 16}
        self.room = SnapshotRoom(3) if room is None else room
        self.scheduler = Scheduler(
            num_blocks=num_blocks, groups=groups, snapshots=self.room, **{**defaults, **options}
        )
        self.device, self.depth, self.num_asked = StateDevice(groups), depth, 0

    def add(self, prompt, max_tokens=24):
        self.num_asked += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.scheduler.add(Request(f"r{self.num_asked}", prompt, params))

    def run(self):
        in_flight = []
        while self.scheduler.has_work or in_flight:
            plan = self.scheduler.schedule() if len(in_flight) < self.depth else None
            if plan is not None:
                in_flight.append((plan, self.device.run(plan)))
            else:
                self.scheduler.update(*in_flight.pop(0))
        self.scheduler.check()

    def ask(self, prompt, **options):
        """Returns the tokens with the answer, and how many were found."""
        seq = self.add(prompt, **options)
        self.run()
        return seq.token_ids, seq.num_cached_tokens


def tokens(count, seed=0):
    r = random.Random(seed)
    return [r.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("chunk", [11, 256])
@pytest.mark.parametrize("groups", [SEE_ALL, (LayerGroup((0,), 16), LayerGroup((1,), 16, 20))])
def test_the_next_turn_computes_its_own_tokens_and_at_most_a_block(groups, chunk, depth):
    engine = Engine(groups=groups, depth=depth, max_num_batched_tokens=chunk)
    known, found = engine.ask(tokens(75))
    assert found == 0
    for i, count in enumerate((9, 40, 1, 23, 16, 5)):
        old = len(known)
        known, found = engine.ask(known + tokens(count, seed=i + 1), max_tokens=17 + i)
        assert old - 16 <= found <= old


@pytest.mark.parametrize("length", (60, 61, 63, 64, 65, 66, 68, 72, 79, 80, 81, 84, 95))
def test_a_turn_after_a_rewritten_answer_starts_at_the_prompt(length):
    engine = Engine()
    prompt = tokens(length)
    engine.ask(prompt)
    assert length - 16 <= engine.ask(prompt + tokens(30, seed=1))[1] <= length
    other = tokens(length, seed=2)
    engine.ask(other)
    assert length - 4 - 16 <= engine.ask(other[:-4] + tokens(30, seed=3))[1] <= length - 4


def test_the_third_conversation_starts_behind_the_system_prompt():
    engine = Engine()
    system = tokens(83)
    conversations = [system + tokens(40, seed=i) for i in range(1, 5)]
    asked = []
    for prompt in conversations:
        asked.append(engine.add(prompt))
        engine.run()
    assert [seq.num_cached_tokens for seq in asked] == [0, 0, 80, 80]
    assert [seq.num_recomputed_tokens for seq in asked] == [0, 80, 0, 0]
    known = asked[0].token_ids
    assert engine.ask(known + tokens(20, seed=9))[1] >= len(known) - 16


def test_the_same_prompt_is_found_but_for_its_last_token():
    engine = Engine()
    for length in (96, 100):
        prompt = tokens(length, seed=length)
        engine.ask(prompt)
        assert engine.ask(prompt)[1] >= length - 17


@pytest.mark.parametrize("budget, found", [(256, [0, 256, 336, 336]), (2048, [0, 0, 336, 336])])
def test_requests_at_once_share_the_head_from_the_third_on(budget, found):
    """The second one sees that it shares the head with the first, and begins with what the first has computed
    in a step before. It ends a chunk where their paths part, and the others wait for that."""
    engine = Engine(200, max_num_seqs=8, max_num_batched_tokens=budget)
    head = tokens(340)
    asked = [engine.add(head + tokens(60, seed=i), max_tokens=2) for i in range(1, 5)]
    engine.run()
    assert [seq.num_cached_tokens for seq in asked] == found


def test_a_request_has_a_running_one_take_a_snapshot_where_their_paths_part(monkeypatch):
    monkeypatch.setattr(state_blocks, "CUT_TOKENS", 64)
    engine = Engine(200, max_num_batched_tokens=64, long_prefill_token_threshold=48)
    head = tokens(200)
    asked = [engine.add(head + tokens(60, seed=i), max_tokens=2) for i in range(1, 3)]
    engine.run()
    assert [seq.num_cached_tokens for seq in asked] == [0, 192]


def test_a_turn_is_found_after_a_preemption():
    engine = Engine(num_blocks=15, room=SnapshotRoom(3, reserved=48), max_num_seqs=3)
    asked = [engine.add(tokens(90, seed=i)) for i in range(3)]
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    known = asked[-1].token_ids
    assert engine.ask(known + tokens(10, seed=9))[1] >= len(known) - 16


def test_a_preempted_sequence_computes_at_most_a_block_and_what_was_not_known():
    engine = Engine(depth=1)
    seq = engine.add(tokens(90), max_tokens=100)
    for _ in range(60):
        plan = engine.scheduler.schedule()
        engine.scheduler.update(plan, engine.device.run(plan))
    engine.scheduler.preempt_all()
    known = len(seq.token_ids)
    plan = engine.scheduler.schedule()
    [entry] = plan.scheduled
    assert known - 17 <= entry.start < known and plan.copies is not None and plan.copies.restores


def test_a_long_prompt_leaves_snapshots_behind_at_the_distance_of_equal_bytes():
    """A snapshot of 8 blocks has the bytes of 128 tokens."""
    engine = Engine(400, room=SnapshotRoom(8), max_num_batched_tokens=64)
    prompt = tokens(900)
    engine.ask(prompt)
    lost = []
    for length in range(200, 880, 60):
        _, found = engine.ask(prompt[:length] + tokens(20, seed=length), max_tokens=1)
        lost.append(length - found)
    assert max(lost) <= 128 + 64 + 16 and engine.scheduler.stats().num_snapshots < 60


def test_snapshots_give_way_to_the_kv_of_running_sequences():
    """Room for 24 blocks: sequences get all of it though snapshots are there, and none is preempted for a
    snapshot's sake."""
    engine = Engine(num_blocks=24, room=SnapshotRoom(5), max_model_len=384)
    for i in range(4):
        engine.ask(tokens(100, seed=i))
    assert engine.scheduler.stats().num_snapshots > 0
    known, _ = engine.ask(tokens(340, seed=9), max_tokens=40)
    assert len(known) == 380 and engine.scheduler.stats().num_preemptions == 0


def test_a_prompt_that_needs_the_whole_cache_starts_without_its_snapshot():
    """Regression: the prompt waited forever, as its prefix was found and the snapshot held the last blocks that it
    needed."""
    engine = Engine(num_blocks=10, room=SnapshotRoom(3), max_model_len=160)
    head = tokens(20)
    engine.ask(head, max_tokens=1)
    known, found = engine.ask(head + tokens(120, seed=1), max_tokens=20)
    assert len(known) == 160 and found == 0


def test_a_snapshot_goes_with_its_last_kv_block():
    engine = Engine(room=SnapshotRoom(3, reserved=300), num_blocks=30)
    first = tokens(100)
    engine.ask(first)
    before = engine.scheduler.stats().num_snapshots
    assert before >= 3
    engine.ask(tokens(400, seed=1))
    blocks = engine.scheduler.blocks
    assert all(blocks.pool.find(key) is not None for key in blocks.snapshots._found)


def test_old_snapshots_go_before_newer_kv():
    """Conversations with turns: what is evicted first is what was used longest ago, snapshots of old turns too."""
    engine = Engine(num_blocks=200, room=SnapshotRoom(10))
    known, _ = engine.ask(tokens(60))
    for i in range(12):
        old = len(known)
        known, found = engine.ask(known + tokens(20, seed=i))
        assert found >= old - 16
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == 200 and stats.num_snapshots <= 20


def test_a_model_without_prefix_cache_takes_no_snapshots():
    engine = Engine(enable_prefix_caching=False)
    engine.ask(tokens(100))
    assert not engine.device.sizes and engine.ask(tokens(100))[1] == 0


def test_a_reset_forgets_snapshots():
    engine = Engine()
    engine.ask(tokens(100))
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.stats().num_snapshots == 0 and engine.ask(tokens(100))[1] == 0
