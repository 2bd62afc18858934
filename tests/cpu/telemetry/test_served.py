"""Totals of workers, and recent rates."""

import random
import re

import numpy as np
import pytest

from shoal.telemetry.metrics import FIRST_TOKEN_SECONDS, LATENCY_SECONDS, TOKEN_SECONDS, ModelMetrics
from shoal.telemetry.served import ServedTotals, quantiles_of, recent_rates, sum_totals


def served(times, gaps=(), **more):
    found = ServedTotals.counting()
    for seconds in times:
        found.add_first(seconds, 1)
    for seconds in gaps:
        found.add_further(seconds, 1)
    for name, value in more.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("scale", [0.002, 0.05, 3.0])
def test_quantiles_are_those_of_numpy_to_within_a_bucket(scale):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    times = np.random.default_rng(seed).lognormal(np.log(scale), 0.7, 2000)
    found = quantiles_of(served(times).first_token)
    for value, share in ((found.p50, 50), (found.p99, 99)):
        assert value == pytest.approx(np.percentile(times, share), rel=0.14)


def test_there_are_no_quantiles_of_nothing():
    assert quantiles_of([]) is None and quantiles_of(ServedTotals.counting().first_token) is None


def test_times_beyond_all_buckets_are_the_last_bound():
    assert quantiles_of(served([1e6]).first_token).p50 == LATENCY_SECONDS[-1]


def test_what_came_lately_is_a_difference():
    before = served([1.0] * 50, [1.0] * 50, prompt_tokens=1000, cached_tokens=0)
    now = served([1.0] * 50 + [0.1] * 10, [1.0] * 50 + [0.01] * 100, prompt_tokens=1200, cached_tokens=50)
    recent = recent_rates(now, before, 10.0, before)
    assert (recent.prompt_tokens_s, recent.output_tokens_s, recent.hit_rate) == (20.0, 11.0, 0.25)
    assert recent.ttft.p99 <= 0.1 and recent.itl.p99 <= 0.01


def test_a_process_that_starts_again_counts_from_zero():
    before, now = served([1.0] * 9, prompt_tokens=90), served([2.0], prompt_tokens=5)
    assert now.since(before) == now
    assert recent_rates(now, before, 2.0, before).output_tokens_s == 0.5


def test_a_process_that_starts_again_and_overtakes_what_it_had_counts_from_zero():
    """Ten short answers before the restart, one long one after it: more tokens, and fewer first ones."""
    before, now = served([1.0] * 10, prompt_tokens=90), served([2.0], [0.1] * 30, prompt_tokens=5)
    assert now.since(before) == now
    assert recent_rates(now, before, 2.0, before).ttft.p50 == pytest.approx(2.0, rel=0.13)


def test_sums_add_up_where_some_have_counted_no_times():
    total = sum_totals([served([1.0], [0.5]), ServedTotals(prompt_tokens=3), served([2.0], failed=1)])
    assert (total.prompt_tokens, total.failed, total.output_tokens) == (3, 1, 3)
    assert sum(total.first_token) == 2 and sum(total.between_tokens) == 1


def test_prometheus_sees_vllms_buckets_alone():
    metrics = ModelMetrics("m", 128, {})
    for seconds in (0.0005, 0.003, 0.003, 0.3, 4000.0):
        metrics.first_token.observe(seconds)
        metrics.between_tokens.observe(seconds)
    for histogram, bounds in (
        (metrics.first_token, FIRST_TOKEN_SECONDS),
        (metrics.between_tokens, TOKEN_SECONDS),
    ):
        samples = [s for s in histogram.family(("m", "0")).samples if s.name.endswith("_bucket")]
        shown = {float(s.labels["le"]): s.value for s in samples}
        assert list(shown) == [*bounds, float("inf")]
        assert shown == {b: sum(x <= b for x in (0.0005, 0.003, 0.003, 0.3, 4000.0)) for b in shown}
        assert all(re.fullmatch(r"[\d.e+]+|\+Inf", s.labels["le"]) for s in samples)
