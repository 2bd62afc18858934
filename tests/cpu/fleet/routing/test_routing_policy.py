"""Policies are pure: these tests hold their figures, most of them asserted by NVIDIA Dynamo's own tests."""

import collections
import random

import pytest

from shoal.errors import ConfigError
from shoal.fleet.index.indexer import Overlap, WorkerRank
from shoal.fleet.routing.active_requests import ActiveRequests, Load
from shoal.fleet.routing.policy import (
    POLICIES,
    Candidate,
    PolicyRequest,
    RouterWeights,
    check_policy,
    choose,
    kv_cost,
)

A, B, C = (WorkerRank(name) for name in "abc")


NOTHING = Overlap()
# Dynamo's defaults, without Shoal's additions
DYNAMO = {"overlap_score_credit": 1.0, "prefill_load_scale": 1.0, "recent_prefill_weight": 0.0}


def cost(load, overlap=NOTHING, num_tokens=64, block_size=16, **weights):
    weights = RouterWeights(**DYNAMO | weights)
    return kv_cost(PolicyRequest(num_tokens), Candidate(A, block_size, overlap, load), weights, 16)


@pytest.mark.parametrize(
    "load, overlap, weights, wanted",
    [
        (Load(0, 16, 5 * 16), Overlap(6), {"prefill_load_scale": 2.0}, 7.0),
        (Load(4, 0, 100 * 16), Overlap(4), {"decode_active_request_weight": 32.0}, 228.0),
        (Load(4, 0, 100 * 16), Overlap(4), {}, 100.0),
        (Load(), Overlap(1, 2, 1), {}, 4 - 1 - 1.5 - 0.25),
    ],
)
def test_the_cost_has_the_figures_that_dynamos_tests_assert(load, overlap, weights, wanted):
    assert cost(load, overlap, **weights) == pytest.approx(wanted)


def test_workers_of_several_block_sizes_are_compared_in_tokens():
    small, large = cost(Load(), Overlap(4), block_size=16), cost(Load(), Overlap(1), block_size=64)
    assert small == large == 0.0


def went(policy, loads, asks, seed=0, overlaps=None, **weights):
    rng = random.Random(seed)
    candidates = [
        Candidate(rank, 16, (overlaps or {}).get(rank, Overlap()), load) for rank, load in loads.items()
    ]
    return [choose(policy, ask, candidates, RouterWeights(**weights), rng, 16).rank for ask in asks]


def test_round_robin_takes_turns():
    loads = dict.fromkeys((A, B, C), Load())
    assert went("round_robin", loads, [PolicyRequest(9, turn=turn) for turn in range(6)]) == [
        A,
        B,
        C,
        A,
        B,
        C,
    ]


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "kv", "kv_logit"])
def test_a_busy_worker_is_avoided(policy):
    loads = {A: Load(5, 400, 4000), B: Load()}
    assert set(went(policy, loads, [PolicyRequest(64)] * 20)) == {B}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_seed_repeats_the_choices_and_twins_share_them(policy):
    loads = dict.fromkeys((A, B, C), Load())
    asks = [PolicyRequest(64, f"session {turn}", turn) for turn in range(90)]
    first = went(policy, loads, asks, seed=3)
    assert first == went(policy, loads, asks, seed=3)
    assert min(collections.Counter(first).get(rank, 0) for rank in loads) >= 15


def test_sessions_stay_and_only_those_of_a_lost_worker_move():
    asks = [PolicyRequest(64, f"session {turn}") for turn in range(60)]
    before = went("affinity", dict.fromkeys((A, B, C), Load()), asks)
    after = went("affinity", dict.fromkeys((A, C), Load(3)), asks, seed=9)
    assert [old == new for old, new in zip(before, after)] == [old != B for old in before]


def test_temperature_lets_worse_workers_have_some():
    overlaps, loads = {A: Overlap(4)}, dict.fromkeys((A, B), Load())
    cold = collections.Counter(went("kv", loads, [PolicyRequest(64)] * 200, overlaps=overlaps))
    warm = collections.Counter(
        went("kv", loads, [PolicyRequest(64)] * 200, overlaps=overlaps, router_temperature=1.0)
    )
    assert cold == {A: 200} and 20 < warm[B] < warm[A]


def test_an_unknown_policy_is_a_mistake_that_names_the_others():
    with pytest.raises(ConfigError, match="policy must be one of kv, kv_approx, round_robin"):
        check_policy("best")


# Books


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def route(active_requests, policy, num_tokens, overlaps, request_id, chain=()):
    candidates = [
        Candidate(rank, 16, overlaps.get(rank, Overlap()), active_requests.load(rank)) for rank in (A, B)
    ]
    rng = random.Random(request_id)
    choice = choose(policy, PolicyRequest(num_tokens), candidates, RouterWeights(), rng, 16)
    active_requests.begin(request_id, choice.rank, num_tokens, choice.overlap.total * 16, chain, 16)
    return choice.rank


def test_books_take_in_a_request_and_give_everything_back():
    active_requests = ActiveRequests(Clock())
    active_requests.begin("x", A, 40, 16, [1, 2], 16)
    active_requests.begin("y", A, 50, 0, [1, 2, 3], 16)
    assert active_requests.load(A) == Load(2, 24 + 50, 3 * 16 + 8 + 2, 74)
    active_requests.first_token("x")
    active_requests.first_token("x")
    active_requests.generated("x", 5)
    assert active_requests.load(A) == Load(2, 50, 3 * 16 + 8 + 2 + 5, 74)
    active_requests.end("y")
    active_requests.end("y")
    assert active_requests.load(A) == Load(1, 0, 2 * 16 + 8 + 5, 74)
    active_requests.begin("x", B, 40, 0, [1, 2], 16)  # it moves
    assert active_requests.load(A) == Load(0, 0, 0, 74) and active_requests.load(B).active_requests == 1
    assert active_requests.remove_worker(B) == ["x"] and active_requests.load(B) == Load()
    active_requests.end("x")


def test_a_burst_that_meets_equal_costs_spreads():
    active_requests = ActiveRequests(Clock())
    ranks = [route(active_requests, "kv", 64, {}, f"r{n}") for n in range(40)]
    assert collections.Counter(ranks) == {A: 20, B: 20}


def test_requests_one_after_the_other_spread_also_with_a_hot_prefix():
    clock = Clock()
    active_requests, has = (
        ActiveRequests(clock),
        {A: Overlap(40)},
    )  # only one of the twins has the prefix at first
    counts = collections.Counter()
    for number in range(400):
        rank = route(active_requests, "kv", 45 * 16, has, f"r{number}")
        counts[rank] += 1
        has[rank] = Overlap(40)
        active_requests.first_token(f"r{number}")
        active_requests.end(f"r{number}")
        clock.now += 0.1
    assert min(counts[A], counts[B]) > 120


def test_what_a_request_did_fades_and_a_silent_one_is_given_up():
    clock = Clock()
    active_requests = ActiveRequests(clock)
    active_requests.begin("x", A, 100, 0, [], 16)
    clock.now = 10.0
    assert active_requests.load(A).recent_tokens == pytest.approx(50)
    for _ in range(9):
        clock.now += 3000
        active_requests.generated("x", 1)
        assert active_requests.expire() == []
    clock.now += 4000
    assert active_requests.expire() == ["x"] and active_requests.load(A).active_requests == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_of_which_nothing_is_known_can_be_chosen(policy):
    assert choose(policy, PolicyRequest(64), [Candidate(A)], RouterWeights(), random.Random(0), 16).rank == A
