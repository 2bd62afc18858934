"""Costs of fetching and computing: measured again and again, so that no bad figure lasts."""

import random

import pytest

from shoal.engine.offload.costs import (
    FETCH_LATENCY_S,
    MAX_TRIAL_INTERVAL,
    TRIAL_BLOCKS,
    Costs,
    Rate,
    Throughput,
    plausible_copy_s,
)
from shoal.engine.runner.rank_kv import measure_block_s

BLOCK_S = 0.0004  # to compute a block of 16 tokens


def new_costs(**fetch_s):
    return Costs(16, BLOCK_S / 16, fetch_s)


def talk(costs, num_requests, seconds, num_blocks=500):
    """Requests whose blocks all lie in host memory, one after the other; a block takes `seconds(request)` to
    come up. Returns how many blocks each fetches."""
    fetched = []
    for request in range(num_requests):
        count = costs.num_worth_fetching(["host"] * num_blocks, 0, 0.0)
        if count:
            costs.fetch["host"].add(count * seconds(request), count)
        fetched.append(count)
    return fetched


@pytest.mark.parametrize("first", [2 * BLOCK_S, 100 * BLOCK_S, 1e6])
def test_a_bad_first_figure_is_mended_by_the_first_request_that_passes_the_tier_over(first):
    fetched = talk(new_costs(host=first), 24, lambda request: BLOCK_S / 8)
    assert 1 <= fetched[0] <= TRIAL_BLOCKS, "a trial on a few blocks of real work"
    assert fetched[1:] == [500] * 23


def test_one_bad_figure_among_good_ones_changes_nothing():
    fetched = talk(new_costs(host=BLOCK_S / 8), 24, lambda request: 1.0 if request % 3 == 1 else BLOCK_S / 8)
    assert fetched == [500] * 24


def test_a_run_of_bad_figures_is_mended_within_a_few_requests_of_its_end():
    """Memory is pinned while the first seven requests run."""
    fetched = talk(new_costs(host=BLOCK_S / 8), 30, lambda request: (10 if request < 7 else 1 / 8) * BLOCK_S)
    assert min(fetched[14:]) == 500


def test_a_tier_that_is_slow_is_tried_ever_less_often_and_on_few_blocks():
    costs = new_costs(host=BLOCK_S * 4)
    fetched = talk(costs, 2000, lambda request: BLOCK_S * 4)
    trials = [request for request, count in enumerate(fetched) if count]
    assert max(fetched) <= TRIAL_BLOCKS
    assert len(trials) == costs.trials["host"].num_begun <= 7 + 2000 // MAX_TRIAL_INTERVAL
    assert trials[-1] - trials[-2] == MAX_TRIAL_INTERVAL


def test_a_tier_that_has_become_quick_is_used_again_without_waiting_for_many_trials():
    fetched = talk(new_costs(host=BLOCK_S * 4), 300, lambda request: BLOCK_S * (4 if request < 100 else 0.1))
    found = next(request for request in range(100, 300) if fetched[request])
    assert found < 100 + MAX_TRIAL_INTERVAL and min(fetched[found + 3 :]) == 500


def test_a_trial_takes_one_block_where_more_would_take_too_long():
    assert new_costs(store=3.0).num_worth_fetching(["store"] * 100, 0, 0.0) == 1


def test_a_run_that_is_too_short_to_pay_is_no_reason_for_a_trial():
    costs = new_costs(host=BLOCK_S / 2)
    count = int(FETCH_LATENCY_S / (BLOCK_S / 2)) - 1
    assert costs.num_worth_fetching(["host"] * count, 0, 0.0) == 0
    assert costs.trials["host"].num_begun == 0


def test_the_best_end_of_a_run_over_two_tiers_is_that_of_all_ends():
    r = random.Random(7)
    for _ in range(300):
        costs = Costs(4, 0.001, {"host": r.uniform(0, 0.008), "disk": r.uniform(0, 0.008)})
        run = [r.choice(("host", "disk")) for _ in range(r.randint(0, 20))]
        ahead, fetch_ahead = r.randint(0, 20), r.uniform(0, 0.02)

        def seconds(num_fetched):
            fetching = sum(costs.fetch[tier].seconds for tier in run[:num_fetched])  # noqa: B023
            computing = 0.004 * (len(run) - num_fetched)  # noqa: B023
            wait = fetch_ahead + FETCH_LATENCY_S + fetching  # noqa: B023
            return (wait if num_fetched else 0.001 * ahead) + computing  # noqa: B023

        found = costs.num_worth_fetching(run, ahead, fetch_ahead)
        best = min(range(len(run) + 1), key=seconds)
        tried = sum(trials.num_begun for trials in costs.trials.values())
        assert found == best if not tried else best < found <= best + TRIAL_BLOCKS


def test_blocks_that_are_of_use_only_together_are_fetched_if_all_are_quicker_than_computing():
    costs = Costs(4, 0.001, {"host": 0.001, "disk": 0.01})
    assert costs.are_worth_fetching(["host"] * 10, 100, 0, 0.0)
    assert costs.are_worth_fetching(["host"] * 5 + ["disk"] * 9, 100, 0, 0.0)
    assert not costs.are_worth_fetching(["host"] * 10, 11, 0, 0.0), "a fetch ends later"
    assert costs.are_worth_fetching(["host"] * 10, 11, 50, 0.0), "computing would begin later"
    assert not costs.are_worth_fetching(["host"] * 10, 100, 0, 0.2), "other fetches come first"
    assert costs.trials["host"].num_begun == costs.trials["disk"].num_begun == 0


def test_a_slow_tier_of_blocks_that_are_of_use_only_together_is_tried_now_and_then():
    costs = Costs(4, 0.001, {"host": 0.001, "disk": 0.02})
    found = [costs.are_worth_fetching(["disk"] * 10 + ["host"], 100, 0, 0.0) for _ in range(100)]
    assert 0 < sum(found) < 12 and found[0] and sum(found) == costs.trials["disk"].num_begun
    assert not any(costs.are_worth_fetching(["disk"] * 1000, 100, 0, 0.0) for _ in range(100)), "far too slow"


def test_reads_side_by_side_are_measured_by_the_time_in_which_there_was_work():
    """Two reads at once, of 8 blocks each, which both end within 4 seconds: 0.25 seconds a block. The clock
    is looked at long after."""
    rate = Rate()
    reads = Throughput(rate)
    reads.begun(10.0)
    reads.begun(10.0)
    reads.ended(14.0, 8)
    reads.ended(13.0, 8)
    reads.update_rate()
    assert rate.seconds == 0.25
    reads.begun(100.0)  # nothing was asked of the tier meanwhile
    reads.ended(101.0, 4)
    reads.update_rate()
    assert rate.latest == 0.25


def test_reads_that_fail_at_once_do_not_make_a_tier_look_quick():
    rate = Rate(1.0)
    reads = Throughput(rate)
    reads.begun(0.0)
    reads.ended(0.001, 0)
    reads.update_rate()
    assert rate.seconds == 1.0


class Machine:
    """Copies take 1 ms a block and 5 ms a call; the `disturbed` ones, by number, take half a second more."""

    def __init__(self, disturbed):
        self.now, self.disturbed, self.num_copies = 0.0, disturbed, 0

    def copy(self, num_blocks):
        self.now += 0.005 + 0.001 * num_blocks + (0.5 if self.num_copies in self.disturbed else 0.0)
        self.num_copies += 1


@pytest.mark.parametrize("disturbed", [set(), set(range(19)), {*range(0, 17, 2), *range(3, 20, 2)}], ids=str)
def test_the_first_figure_is_right_though_most_tries_were_disturbed(disturbed):
    machine = Machine(disturbed)
    assert measure_block_s(machine.copy, 32, lambda: machine.now) == pytest.approx(0.001)


def test_a_first_figure_beyond_what_machines_take_is_not_believed():
    block_bytes = 36 * 2 * 8 * 16 * 128 * 2  # a block of qwen3-8b
    assert plausible_copy_s(0.0001, block_bytes, "cuda") == 0.0001
    assert plausible_copy_s(0.02, block_bytes, "cuda") < 0.0004, "less than an H200 computes a block in"
