"""Sequences with several tables of blocks: a simulated device writes and reads the blocks of every step, and finds
at each position that a token sees the content of that very prefix. A failing seed is in the test's output;
`trace(seed)` repeats it."""

import random
from collections import Counter

import pytest

from shoal.api import Request
from shoal.engine.scheduling.grouped_blocks import GroupedBlocks
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import SequenceStatus
from shoal.hashing import extend_keys
from shoal.kv.groups import NO_BLOCK, CacheKind, LayerGroup, make_groups
from shoal.kv.places import match, measure
from shoal.sampling_params import SamplingParams
from tests.seeded import prints_its_seed

TRACES_A_TEST = 60
VOCAB = 4


def add_random_request(r: random.Random, scheduler: Scheduler, prompts: list[list[int]]) -> None:
    """Most prompts begin as an earlier one does. One that has no room is left out."""
    base = r.choice(prompts)[: r.randint(0, 50)] if prompts and r.random() < 0.8 else []
    prompt = (base + [r.randrange(VOCAB) for _ in range(r.randint(1, 12))])[:50]
    if len(prompt) < scheduler.blocks.room:
        params = SamplingParams(max_tokens=r.randint(1, 10), ignore_eos=True)
        scheduler.add(Request(f"r{len(prompts)}", prompt, params))
        prompts.append(prompt)


class Device:
    """The blocks' contents: for each block and offset the group and the tokens up to that position."""

    def __init__(self, groups: tuple[LayerGroup, ...]):
        self.groups = groups
        self.memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.tokens: dict[str, list[int]] = {}

    def run(self, plan) -> list[list[int]]:
        """Runs a step: all writes, then all reads, so that a block given to another sequence too early
        shows."""
        spans = []
        for entry in plan.scheduled:
            seq = entry.seq
            known = self.tokens.setdefault(seq.request.request_id, list(seq.token_ids))
            assert known[: len(seq.token_ids)] == seq.token_ids
            spans.append((entry, known, [list(table) for table in seq.tables]))
        for entry, known, tables in spans:
            for position in range(entry.start, entry.start + entry.num_tokens):
                for g, table in enumerate(tables):
                    size = self.groups[g].block_size
                    block = table[position // size]
                    assert block != NO_BLOCK, "a token without a block"
                    self.memory[block, position % size] = g, tuple(known[: position + 1])
        for entry, known, tables in spans:
            for position in range(entry.start, entry.start + entry.num_tokens):
                for g, (group, table) in enumerate(zip(self.groups, tables)):
                    first = 0 if group.window is None else max(0, position + 1 - group.window)
                    for seen in range(first, position + 1):
                        block, offset = table[seen // group.block_size], seen % group.block_size
                        content = self.memory.get((block, offset))
                        assert content == (g, tuple(known[: seen + 1])), (
                            f"position {position} sees another content at {seen} of group {g}"
                        )
        sampled = []
        for entry, known, _ in spans:
            if entry.samples:
                token = hash(tuple(known)) % VOCAB
                known.append(token)
                sampled.append([token])
        return sampled


def random_groups(r: random.Random, size: int) -> tuple[LayerGroup, ...]:
    windows = r.choice(((None, 3), (None, 9), (5,), (2, 7), (None, None, 4), (None, 1, 6)))
    return tuple(LayerGroup((), size * r.choice((1, 1, 2)), window) for window in windows)


def check_measure(scheduler) -> None:
    """Checks that the prefix of each waiting sequence is measured as it is found."""
    pool = scheduler.blocks.pool
    for seq in scheduler.waiting:
        if pool.enable_caching:
            keys: list[bytes] = []
            extend_keys(keys, seq.root, seq.token_ids[:-1], scheduler.blocks.block_size)
            tables, end = match(pool, scheduler.blocks.groups, keys, scheduler.blocks.block_size)
            num_held = sum(pool.is_held(block) for table in tables for block in table if block != NO_BLOCK)
            assert measure(pool, scheduler.blocks.groups, keys, scheduler.blocks.block_size) == (
                end,
                num_held,
            )


@prints_its_seed
def trace(seed: int) -> Counter[str]:
    r = random.Random(seed)
    size = r.choice((1, 2, 4))
    groups = random_groups(r, size)
    num_blocks = r.randint(4 * len(groups), 12 * len(groups) + 60 // size)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=r.randint(1, 5),
        max_num_batched_tokens=r.choice((5, 8, 16, 64)),
        max_model_len=60,
        enable_prefix_caching=r.random() < 0.8,
        groups=groups,
    )
    device, seen, in_flight = Device(groups), Counter[str](), []
    prompts: list[list[int]] = []
    for _ in range(250):
        if r.random() < 0.15 and len(scheduler.waiting) < 4:
            add_random_request(r, scheduler, prompts)
        if r.random() < 0.02 and (scheduler.running or scheduler.waiting):
            scheduler.abort(r.choice([*scheduler.running, *scheduler.waiting]).request.request_id)
        if len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            seen["hits"] += sum(entry.begins and entry.start > 0 for entry in plan.scheduled)
            in_flight.append((plan, device.run(plan)))
            seen["given back"] += sum(
                NO_BLOCK in table for entry in plan.scheduled for table in entry.seq.tables
            )
        elif in_flight:
            plan, sampled = in_flight.pop(0)
            for result in scheduler.update(plan, sampled):
                seen["finished"] += result.finish_reason is not None
        elif scheduler.running:
            raise AssertionError("nothing can run, though sequences have begun")
        scheduler.check()
        check_measure(scheduler)
    while scheduler.has_work or in_flight:
        if len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            in_flight.append((plan, device.run(plan)))
        else:
            assert in_flight, "no sequence can run"
            scheduler.update(*in_flight.pop(0))
    seen["preempted"] += scheduler.stats().num_preemptions
    scheduler.check()
    assert scheduler.blocks.pool.num_free == num_blocks
    return seen


@pytest.mark.parametrize("first_seed", [0, pytest.param(TRACES_A_TEST, marks=pytest.mark.slow)])
def test_every_token_sees_its_own_prefix_in_all_groups(first_seed):
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    for name in ("hits", "given back", "finished", "preempted"):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


def scheduler_of(groups, num_blocks, **options):
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 1024, "block_size": 16}
    return Scheduler(num_blocks=num_blocks, groups=groups, **{**defaults, **options})


def finish(scheduler, prompt, max_tokens=4, name="a"):
    """Runs a request alone, and returns how many tokens it found in the cache."""
    device = Device(scheduler.blocks.groups)
    seq = scheduler.add(Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        most = max(most, len(scheduler.blocks.blocks_of(seq)))
        scheduler.update(plan, [[0] for entry in plan.scheduled if entry.samples])
        scheduler.check()
    del device
    return seq.num_cached_tokens, most


def test_a_model_whose_layers_all_slide_serves_prompts_longer_than_its_cache():
    scheduler = scheduler_of((LayerGroup((0,), 16, 20),), 16)
    assert scheduler.blocks.room == 1024
    _, most = finish(scheduler, list(range(900)), 40)
    assert most <= -(-(19 + 64) // 16) + 1


def test_a_small_cache_gets_shorter_chunks():
    scheduler = scheduler_of((LayerGroup((0,), 16, 20),), 16, max_num_batched_tokens=1024)
    assert scheduler.blocks.chunk < 256 and scheduler.blocks.room == 1024
    finish(scheduler, list(range(900)), 40)


def test_a_group_with_a_window_holds_no_more_than_the_window_and_a_chunk():
    groups = (LayerGroup((0,), 16), LayerGroup((1,), 16, 20))
    scheduler = scheduler_of(groups, 80)
    _, most = finish(scheduler, list(range(900)))
    assert most <= -(-904 // 16) + -(-(19 + 64) // 16) + 1


@pytest.mark.parametrize("shared", [16, 18, 35, 70, 99])
def test_a_prefix_is_found_though_its_blocks_have_left_the_window(shared):
    scheduler = scheduler_of((LayerGroup((0,), 16), LayerGroup((1,), 16, 20)), 80)
    first = list(range(1000, 1100))
    assert finish(scheduler, first)[0] == 0
    other = first[:shared] + list(range(2000, 2090))
    assert finish(scheduler, other, name="b")[0] == shared // 16 * 16


def test_a_prefix_is_cut_where_a_window_lacks_its_blocks():
    """Each group needs what its next position sees: of a prefix of 96 tokens, a window of 20 needs blocks 4 and
    5, one of 64 tokens blocks 2 and 3."""
    groups = (LayerGroup((0,), 16), LayerGroup((1,), 16, 20))
    scheduler = scheduler_of(groups, 80)
    prompt = list(range(1000, 1100))
    seq = scheduler.add(Request("a", prompt, SamplingParams(max_tokens=1)))
    scheduler.schedule()
    scheduler.schedule()
    blocks = scheduler.blocks
    key_of_4 = blocks.pool.key_of(seq.tables[1][4])
    scheduler.abort("a")
    assert finish(scheduler, [*prompt, 7], name="b")[0] == 96
    blocks.pool.reset([key_of_4])
    assert finish(scheduler, [*prompt, 8], name="c")[0] == 64


def test_groups_of_larger_blocks_are_found_at_multiples_of_them():
    scheduler = scheduler_of((LayerGroup((0,), 32), LayerGroup((1,), 16, 20)), 80)
    prompt = list(range(1000, 1100))
    finish(scheduler, prompt)
    assert finish(scheduler, [*prompt, 7], name="b")[0] == 96
    assert finish(scheduler, [*prompt[:50], 7], name="c")[0] == 32


def test_a_block_that_was_given_back_keeps_its_content_until_it_is_taken():
    scheduler = scheduler_of((LayerGroup((0,), 16, 20),), 64)
    seq = scheduler.add(Request("a", list(range(500)), SamplingParams(max_tokens=1)))
    for _ in range(4):
        scheduler.schedule()
    assert seq.tables[0][0] == NO_BLOCK and seq.status is SequenceStatus.PREFILL
    assert finish(scheduler, [*range(40), 7], name="b")[0] == 32


@pytest.mark.parametrize("at, begins_at, num_cached", [(12, 12, 0), (1, 6, 992)])
def test_a_sequence_waits_for_a_shared_beginning_only_while_it_is_computed(at, begins_at, num_cached):
    """Regression: a request that shares the beginning of a long prompt, whose early window blocks were
    overwritten meanwhile, waited for the whole prompt and then found nothing."""
    groups = (LayerGroup((0,), 16), LayerGroup((1,), 16, 64))
    options = {"max_num_batched_tokens": 256, "max_model_len": 6400, "long_prefill_token_threshold": 128}
    scheduler = scheduler_of(groups, 480, **options)
    shared = list(range(1000))
    scheduler.add(Request("a", shared + list(range(2000, 7000)), SamplingParams(max_tokens=4)))
    for step in range(at):
        assert scheduler.schedule(), step
    seq = scheduler.add(Request("b", [*shared, *range(100)], SamplingParams(max_tokens=4)))
    while seq.status is SequenceStatus.WAITING:
        assert scheduler.schedule()
        at += 1
    assert (at - 1, seq.num_cached_tokens) == (begins_at, num_cached)


class Asked(dict):
    num_asked = 0

    def get(self, *args):
        self.num_asked += 1
        return super().get(*args)


def test_the_head_of_a_blocked_queue_looks_at_a_few_keys():
    """Regression: the head of a blocked queue looked all its blocks up in each step."""
    groups = (LayerGroup((0,), 16), LayerGroup((1,), 16), LayerGroup((2,), 16, 64))
    scheduler = scheduler_of(groups, 1500, max_model_len=6400, max_num_batched_tokens=6400)
    prompt = list(range(6000))
    scheduler.add(Request("a", prompt, SamplingParams(max_tokens=9)))
    scheduler.schedule()
    seq = scheduler.add(Request("b", [*prompt[:5000], *range(400)], SamplingParams(max_tokens=9)))
    assert scheduler.blocks.pool.try_allocate(scheduler.blocks.pool.num_free - 9)
    keys = scheduler.blocks.pool._key_to_block = Asked(scheduler.blocks.pool._key_to_block)
    assert scheduler.blocks.lacks_room(seq) and 0 < keys.num_asked < 100


S, F = CacheKind(4096, 1024), CacheKind(4096)
HALF, WIDE, NARROW = CacheKind(2048, None, (1,)), CacheKind(1024), CacheKind(512, 512)


@pytest.mark.parametrize(
    "kinds, num_groups, sizes",
    [
        ([F] * 32, 1, {16}),
        ([S] * 32, 1, {16}),
        ([S, F] * 12, 2, {16}),  # gpt-oss 20b
        ([F if i % 6 == 5 else S for i in range(62)], 6, {16}),  # Gemma 3 27B
        ([F if i % 6 == 5 else S for i in range(18)], 6, {16}),  # Gemma 3 270M
        ([HALF if i % 6 == 5 else S for i in range(30)], 6, {16, 32}),  # Gemma 4 26B-A4B
        ([(WIDE if i % 5 == 4 else NARROW) if i < 15 else None for i in range(35)], 5, {16, 32}),  # E2B
        ([F, S, S, F, S], 5, {16}),
    ],
)
def test_groups_of_published_models(kinds, num_groups, sizes):
    groups, block_bytes = make_groups(kinds, 16)
    assert len(groups) == num_groups and {group.block_size for group in groups} == sizes
    layers = sorted(layer for group in groups for layer in group.layers)
    assert layers == [i for i, kind in enumerate(kinds) if kind is not None]
    for kind in {kind for kind in kinds if kind is not None}:
        own = [group for group in groups if kinds[group.layers[0]] == kind]
        used = sum(len(group.layers) * group.block_size * kind.token_bytes for group in own)
        assert all(len({kinds[i] for i in group.layers}) == 1 for group in own)
        assert 0.85 <= used / (len(own) * block_bytes) <= 1
    assert [group.window is None for group in groups] == sorted(
        (group.window is None for group in groups), reverse=True
    )


def test_one_kind_of_layer_that_sees_everything_has_no_groups():
    assert not isinstance(scheduler_of((LayerGroup((0,), 16),), 16).blocks, GroupedBlocks)
