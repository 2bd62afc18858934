"""The router as a library: prefixes, books, decisions that stand for events, recorded events."""

import collections
import io
import itertools
import json
import random
from collections import Counter

import pytest

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from shoal.fleet.index.predictions import Predictions
from shoal.fleet.index.recorder import EventPublisher, Recorder, apply_router_event, read
from shoal.fleet.routing.kv_router import NUM_BEST, NUM_SAMPLED, KvRouter
from shoal.kv_events import GPU, AllBlocksCleared, BlockStored

A, B = WorkerRank("a"), WorkerRank("b")
PROMPT = list(range(100, 164))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def router(policy="kv", clock=None, **options):
    return KvRouter(
        KvIndexer(16), workers=["a", "b"], policy=policy, seed=0, clock=clock or Clock(), **options
    )


def store(index, rank, tokens, first_name=0, size=16):
    names = list(range(first_name, first_name + len(tokens) // size))
    index.apply(rank, BlockStored(names, None, tokens, size, None, GPU, None))


def test_the_longest_prefix_wins_and_asking_changes_nothing():
    r = router()
    store(r.indexer, A, PROMPT[:16])
    store(r.indexer, B, PROMPT)
    for _ in range(5):
        choice = r.schedule([*PROMPT, 1, 2])
        assert choice.rank == B and choice.overlap == Overlap(4) and choice.costs[A] > choice.costs[B]
    assert r.active_requests.load(B).active_requests == 0


def test_a_choice_is_in_the_books_before_the_next_one():
    r = router()
    ranks = [r.schedule([n] * 64, request_id=str(n)).rank for n in range(10)]
    assert collections.Counter(ranks) == {A: 5, B: 5}
    assert r.active_requests.load(A).prefill_tokens == 5 * 64


def test_workers_of_several_block_sizes_find_the_same_prefix():
    r = router()
    store(r.indexer, A, PROMPT, size=16)
    store(r.indexer, B, PROMPT, size=32)
    costs = r.schedule(PROMPT).costs
    assert costs[A] == costs[B] == 0.0


def test_without_events_decisions_count_until_they_are_old():
    clock = Clock()
    r = router("kv_approx", clock)
    first = r.schedule(PROMPT, request_id="1").rank
    r.active_requests.end("1")
    clock.now = 60.0  # what was done lately has faded
    assert r.schedule(PROMPT).rank == first and r.schedule(PROMPT).overlap == Overlap(4)
    clock.now = 121.0
    assert r.schedule(PROMPT).overlap == Overlap(0)


def test_a_predicted_block_counts_until_the_event_comes_and_no_longer():
    clock = Clock()
    r = router("kv", clock)
    rank = r.schedule(PROMPT, request_id="1").rank
    r.active_requests.end("1")
    assert r.schedule(PROMPT).rank == rank and r.schedule(PROMPT).overlap == Overlap(4)
    clock.now = 100.0
    assert r.schedule(PROMPT).overlap == Overlap(0)
    store(r.indexer, rank, PROMPT)
    assert r.schedule(PROMPT).overlap == Overlap(4)


def test_a_worker_that_leaves_takes_its_blocks_and_tells_its_requests():
    r = router()
    store(r.indexer, A, PROMPT)
    assert r.schedule(PROMPT, request_id="1").rank == A
    assert r.remove_worker(A) == ["1"]
    assert r.schedule(PROMPT).rank == B and r.schedule(PROMPT).overlap == Overlap(0)
    assert r.schedule(PROMPT, among=[A, B]).rank == B
    r.remove_worker(B)
    for among in (None, [A, B]):
        with pytest.raises(UnavailableError, match="no worker can take"):
            r.schedule(PROMPT, among=among)


def test_an_unknown_policy_is_named_in_the_error():
    with pytest.raises(ConfigError, match="got 'x'"):
        KvRouter(KvIndexer(16), policy="x")


def test_events_are_recorded_in_dynamos_shape_and_replayed(tmp_path):
    file, clock = io.StringIO(), Clock()
    recorder = Recorder(file, clock)
    publisher = EventPublisher(7, 16, recorder.write)
    publisher.stored(1, PROMPT[:40], [16, 16, 8], [501, 502, 503])  # the last is not full
    clock.now = 12.4
    publisher.stored(2, PROMPT[32:], [16, 16], [503, 504], parent_hash=502)
    publisher.removed(3, [504])
    (tmp_path / "events.jsonl").write_text(file.getvalue())
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 12, 12]
    first = lines[0]["event"]
    assert first["worker_id"] == 7 and first["event"]["event_id"] == 1
    blocks = first["event"]["data"]["stored"]["blocks"]
    assert [block["block_hash"] for block in blocks] == [501, 502] and blocks[0].keys() == {
        "block_hash",
        "tokens_hash",
    }
    index = KvIndexer(16)
    for _, event in read(tmp_path / "events.jsonl"):
        apply_router_event(index, event)
    assert index.find_matches(PROMPT) == {WorkerRank("7"): Overlap(3)}
    apply_router_event(index, {"worker_id": 7, "event": {"event_id": 4, "data": "cleared"}})
    assert index.find_matches(PROMPT) == {}
    with pytest.raises(ValueError, match="do not agree"):
        publisher.stored(5, PROMPT, [16], [1])
    with pytest.raises(ValueError, match="must have Dynamo's shape"):
        apply_router_event(index, {"worker_id": 7})
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read(tmp_path / "bad.jsonl"))


def test_all_blocks_cleared_forgets_one_worker_alone():
    index = KvIndexer(16)
    store(index, A, PROMPT)
    store(index, B, PROMPT)
    index.apply(A, AllBlocksCleared())
    assert index.find_matches(PROMPT) == {B: Overlap(4)}


def test_a_worker_that_has_a_whole_prompt_loses_nothing_by_computing_its_last_token():
    clock = Clock()
    r = router("kv_approx", clock)
    for rank in (A, B):
        r.add_worker(rank, has_events=False)
    longer = [*PROMPT, *range(300, 364)]
    r.schedule(longer, request_id="1")
    clock.now = 1.0
    r.schedule(PROMPT, request_id="2")
    r.correct_cached("2", 48, num_expected=64)  # 63 of 64 tokens, three full blocks
    assert r.schedule(longer).overlap == Overlap(8)
    r.correct_cached("2", 32, num_expected=64)
    assert r.schedule(longer).overlap == Overlap(4)


def test_a_correction_does_not_walk_all_that_was_sent():
    class Chain(tuple):
        num_looks = 0

        def __getitem__(self, index):
            Chain.num_looks += 1
            return super().__getitem__(index)

    predictions = Predictions(Clock())
    chains = [Chain((7, number, -number)) for number in range(1, 1001)]
    for chain in chains:
        predictions.add(A, chain, 120.0)
    Chain.num_looks = 0
    predictions.correct(A, chains[-1], 0)
    assert Chain.num_looks <= 10


def test_a_usage_that_is_no_number_does_not_stop_the_router():
    r = router("kv_logit")
    r.published(A, float("nan"), 3)
    r.published(B, 0.9, 0)
    assert r.schedule(PROMPT).rank == A


def test_predictions_equal_those_of_a_naive_book():
    """Random requests, corrections, drops and waits against a list of what every worker was sent."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, now = random.Random(seed), [0.0]
    predictions = Predictions(lambda: now[0])
    has: dict[WorkerRank, dict[int, float]] = {}  # block -> until when
    children: dict[int, set[int]] = {}
    chains = [[0, *(rng.randrange(1, 3) for _ in range(rng.randrange(1, 12)))] for _ in range(30)]
    named = [[hash(tuple(chain[: end + 1])) for end in range(len(chain))] for chain in chains]
    for chain in named:
        for parent, child in itertools.pairwise(chain):
            children.setdefault(parent, set()).add(child)

    def behind(block):
        return {block}.union(*(behind(child) for child in children.get(block, ())))

    for _ in range(2000):
        now[0] += rng.expovariate(2.0)
        rank, chain = WorkerRank(rng.choice("ab")), rng.choice(named)
        mine = has.setdefault(rank, {})
        action = rng.random()
        if action < 0.6:
            predictions.add(rank, chain, 5.0)
            mine.update(dict.fromkeys(chain, now[0] + 5.0))
            if rng.random() < 0.3:
                num_cached = rng.randrange(len(chain) + 1)
                predictions.correct(rank, chain, num_cached)
                for block in behind(chain[num_cached]) - set(chain) if num_cached < len(chain) else ():
                    mine.pop(block, None)
        elif action < 0.7:
            block = rng.choice(chain)
            predictions.drop(rank, block)
            mine.pop(block, None)
        query = rng.choice(named)
        expected = {}
        for worker, blocks in has.items():
            depth = 0
            while depth < len(query) and blocks.get(query[depth], 0.0) > now[0]:
                depth += 1
            if depth:
                expected[worker] = Overlap(depth)
        assert predictions.find_chain(query) == expected
    now[0] += 6.0
    assert predictions.find_chain(named[0]) == {} and predictions.num_blocks(WorkerRank("a")) == 0


def large(num_workers=300, policy="kv", seed=0):
    return KvRouter(KvIndexer(16), workers=[f"w{n}" for n in range(num_workers)], policy=policy, seed=seed)


def test_in_a_large_fleet_who_has_the_prompt_is_found_and_a_burst_spreads():
    router = large()
    tokens = list(range(160))
    first = router.schedule(tokens, request_id="first")
    router.active_requests.first_token("first")
    router.active_requests.end("first")
    again = router.schedule(tokens)
    assert again.rank == first.rank and len(again.costs) <= NUM_BEST + NUM_SAMPLED
    got = [router.schedule(list(range(n * 1000, n * 1000 + 160)), request_id=str(n)).rank for n in range(300)]
    assert max(Counter(got).values()) <= 4


def test_a_choice_in_a_large_fleet_is_repeated_by_a_seed():
    chosen = [[large(seed=3).schedule(list(range(64))).rank for _ in range(3)] for _ in range(2)]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("policy", ["affinity", "round_robin"])
def test_policies_that_count_on_seeing_all_workers_do(policy):
    assert len(large(policy=policy).schedule(list(range(64)), session="s").costs) == 300
