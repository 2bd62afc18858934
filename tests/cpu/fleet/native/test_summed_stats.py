"""SummedStats: counts of workers that left stay in the sums."""

import random

from shoal.fleet.native.summed_stats import MAX_GONE, SummedStats, counted, sum_of
from shoal.stats import KvLoans, KvTierStats, KvTransferStats, Stats
from shoal.telemetry.metrics import ModelMetrics


def worker(steps, **more):
    return Stats(num_running=1, num_blocks=10, step_tokens=steps, prefix_cache_hits=steps, **more)


def test_counts_and_sizes_are_added_and_measured_times_are_averaged():
    one = Stats(
        num_blocks=10,
        decode_step_s=0.2,
        steps_by_tokens=[1, 2],
        kv_tiers={"host": KvTierStats(capacity_bytes=100, stored_blocks=3, stored_bytes=30)},
        kv_transfers={"nixl": KvTransferStats(4, 40, 2.5)},
    )
    other = Stats(
        num_blocks=20,
        decode_step_s=0.0,  # it has measured nothing yet
        steps_by_tokens=[5, 5],
        kv_tiers={
            "host": KvTierStats(200, stored_blocks=1, stored_bytes=10, fetch_seconds_per_block=0.5),
            "disk": KvTierStats(7),
        },
        kv_loans=KvLoans(offers=1, ended={"done": 2}),
        kv_transfers={"nixl": KvTransferStats(6, 60, 1.5)},
    )
    both = sum_of([one, other])
    assert (both.num_blocks, both.decode_step_s, both.steps_by_tokens) == (30, 0.2, [6, 7])
    host = both.kv_tiers["host"]
    assert (host.capacity_bytes, host.stored_blocks, host.stored_bytes) == (300, 4, 40)
    assert host.fetch_seconds_per_block == 0.5 and both.kv_tiers["disk"].capacity_bytes == 7
    assert both.kv_loans == KvLoans(offers=1, ended={"done": 2})
    assert both.kv_transfers["nixl"] == KvTransferStats(10, 100, 4.0)


def test_what_is_counted_leaves_out_what_is_now():
    tier = KvTierStats(100, used_bytes=50, stored_blocks=3, fetch_seconds_per_block=0.5)
    stats = worker(7, kv_tiers={"host": tier}, kv_loans=KvLoans(offers=2, bytes_out=9), decode_step_s=0.1)
    kept = counted(stats)
    assert (kept.num_running, kept.num_blocks, kept.decode_step_s) == (0, 0, 0.0)
    assert kept.step_tokens == kept.prefix_cache_hits == 7
    assert kept.kv_tiers == {"host": KvTierStats(stored_blocks=3)} and kept.kv_loans == KvLoans(bytes_out=9)


def test_a_worker_that_is_gone_takes_nothing_of_its_counts_along():
    sums = SummedStats()
    sums.of({"a": worker(100), "b": worker(10)})
    alone = sums.of({"b": worker(11)})
    assert (alone.step_tokens, alone.num_blocks, alone.num_running) == (111, 10, 1)
    again = sums.of({"b": worker(11), "c": worker(1)})  # the same worker as another process
    assert again.step_tokens == 112


def test_an_engine_that_began_anew_and_has_done_more_since_is_told_by_any_count_that_fell():
    sums = SummedStats()
    sums.of({"a": Stats(step_tokens=100, prefix_cache_hits=50)})
    after = sums.of({"a": Stats(step_tokens=150, prefix_cache_hits=10)})
    assert (after.step_tokens, after.prefix_cache_hits) == (250, 60)


def test_a_worker_that_comes_back_is_not_counted_twice_unless_its_engine_began_anew():
    sums = SummedStats()
    sums.of({"a": worker(100)})
    assert sums.of({}).step_tokens == 100
    assert sums.of({"a": worker(120)}).step_tokens == 120  # it was cut off for a while
    assert sums.of({"a": worker(5)}).step_tokens == 125


def test_every_counter_of_a_router_rises_whatever_its_workers_do():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    sums, metrics, now, last = SummedStats(), ModelMetrics("m", 1024, {}), {}, {}
    for turn in range(400):
        for name in list(now):
            now[name] = sum_of(
                [now[name], worker(draw.randrange(5), steps_by_tokens=[draw.randrange(3)] * 14)]
            )
            if draw.random() < 0.1:
                del now[name]
        if draw.random() < 0.3:
            now[f"w{turn}"] = worker(0, kv_transfers={"nixl": KvTransferStats(1, 2, 0.5)})
        for family in metrics.collect(sums.of(now), None, 0):
            if family.type in ("counter", "histogram"):
                for sample in family.samples:
                    key = (sample.name, *sample.labels.items())
                    assert sample.value >= last.get(key, 0.0), key
                    last[key] = sample.value
        assert len(sums._seen) <= len(now) + MAX_GONE
