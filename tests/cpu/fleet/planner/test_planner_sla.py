"""The planner's rules for latency: each of them, the faults of the reference's planner, and that a record gives
the same decisions again. The worker here takes 0.1 s for a prompt of 1,000 tokens, and 10 ms for a token while
its cache is empty, 50 ms while it is full."""

import dataclasses
import itertools
import random

import msgspec
import pytest

from shoal.errors import ConfigError
from shoal.fleet.file.fleet_file import read_fleet_file
from shoal.fleet.planner import predictors
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import (
    DecodePoint,
    EngineProfile,
    PrefillPoint,
    ProfileData,
    read_profile,
    write_profile,
)
from shoal.fleet.planner.observation import DecodeLoad, Failure, Observation
from shoal.fleet.planner.planner import PlannerState, Recorded, decide, replay
from shoal.fleet.planner.predictors import PREDICTORS, least_points, predict
from shoal.fleet.planner.sla_rules import SlaState
from shoal.fleet.planner.sla_sizing import (
    Corrections,
    Demand,
    Targets,
    latency_apart,
    latency_both,
    sizes_for,
)
from shoal.fleet.simulator.timing import find_timing, profile_of
from shoal.fleet.traffic import Traffic

KV_TOKENS = 100_000


def decode_points(contexts=(500, 2000)):
    for context, usage in itertools.product(contexts, (0.02, 0.5, 1.0)):
        itl_s = 0.01 + 0.04 * usage
        yield DecodePoint(context, usage, itl_s, usage * KV_TOKENS / context / itl_s)


DATA = ProfileData(
    model="m",
    machine="a machine",
    num_gpus=1,
    max_kv_tokens=KV_TOKENS,
    max_num_seqs=256,
    prefill=[PrefillPoint(n, n / 10_000) for n in (100, 1000, 4000)],
    decode=list(decode_points()),
)
PROFILE = EngineProfile(DATA)
CONFIG = PlannerConfig(
    mode="sla",
    adjustment_interval=10.0,
    startup_time=10.0,
    max_gpu_budget=20,
    load_predictor="constant",
    no_correction=True,
)
NONE = Corrections()
TARGETS = Targets(CONFIG.ttft, CONFIG.itl)


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


class Clients:
    """A model's traffic and its workers, looked at each second."""

    def __init__(self, workers=1, prefill=0, settings=CONFIG, profile=PROFILE):
        self.counts = {"decode" if prefill else "both": workers} | ({"prefill": prefill} if prefill else {})
        self.config, self.profile, self.state = settings, profile, PlannerState()
        self.traffic, self.now, self.pending, self.queued = Traffic(), 0.0, 0, 0
        self.decisions, self.lines, self.other_gpus = [], [], 0

    def ask(self, seconds, rate=0.0, tokens=1000, generated=100, ttft=0.15, itl=0.02):
        """A fleet that answers `rate` requests per second at once, and follows decisions at once."""
        interval = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for _ in range(int(self.now * rate) - int((self.now - 1.0) * rate)):
                self.traffic.arrived(tokens)
                self.traffic.began(ttft)
                self.traffic.ended(generated, itl * (generated - 1))
            interval.append(self.look())
            if len(interval) == self.config.judging_interval:
                self.judge(interval)
                interval = []
        return self.counts

    def look(self):
        role = "decode" if "prefill" in self.counts else "both"
        traffic = Traffic(**msgspec.structs.asdict(self.traffic))
        return Observation(
            at=self.now,
            decode=[DecodeLoad(0.5)] * self.counts[role],
            decode_role=role,
            prefill_workers=self.counts.get("prefill", 0),
            pending=self.pending,
            queued=self.queued,
            traffic=traffic,
        )

    def judge(self, interval):
        decision, self.state = decide(
            self.config, self.state, interval, other_gpus=self.other_gpus, profile=self.profile
        )
        self.lines += [Recorded(model="m", observation=each) for each in interval]
        self.lines.append(Recorded(model="m", decision=decision, other_gpus=self.other_gpus))
        self.decisions.append(decision)
        self.counts = dict(decision.desired)
        if self.pending:
            assert not decision.changes


# Sizes


def test_latency_grows_with_load_and_falls_with_workers():
    for latency in (
        lambda rate, n: latency_both(PROFILE, Demand(rate, 1000, 100), NONE, n),
        lambda rate, n: latency_apart(PROFILE, Demand(rate, 1000, 100), NONE, n, n),
    ):
        for n, rate in itertools.product((1, 2, 5), (1, 3, 6)):
            less, more = latency(rate, n), latency(rate + 1, n)
            assert less.ttft_s <= more.ttft_s and less.slow_ttft_s <= more.slow_ttft_s
            assert less.itl_s <= more.itl_s
            many = latency(rate, n + 1)
            assert many.slow_ttft_s <= less.slow_ttft_s and many.itl_s <= less.itl_s


def test_an_idle_worker_takes_what_the_profile_says():
    found = latency_apart(PROFILE, Demand(0.0, 1000, 100), NONE, 1, 1)
    assert found.ttft_s == found.slow_ttft_s == pytest.approx(0.1) and found.itl_s == pytest.approx(0.0108)


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_least_number_of_workers_that_holds_the_targets_is_taken(is_apart):
    demand = Demand(30.0, 1000, 100)
    sizes = sizes_for(PROFILE, demand, NONE, TARGETS, is_apart=is_apart, most=50)

    def holds(prefill, decode):
        found = (
            latency_apart(PROFILE, demand, NONE, prefill, decode)
            if is_apart
            else latency_both(PROFILE, demand, NONE, decode)
        )
        return found.slow_ttft_s <= TARGETS.ttft_s and found.itl_s <= TARGETS.itl_s

    assert not sizes.why_not and holds(sizes.num_prefill, sizes.num_decode)
    assert not holds(sizes.num_prefill, sizes.num_decode - 1)
    assert not is_apart or not holds(sizes.num_prefill - 1, sizes.num_decode)


def test_a_tighter_target_for_the_first_token_takes_more_prefill_workers():
    """In the reference it has no part in the number at all."""
    sizes = [
        sizes_for(PROFILE, Demand(30.0, 1000, 100), NONE, Targets(ttft, 0.05), is_apart=True, most=50)
        for ttft in (0.5, 0.15, 0.11)
    ]
    assert sizes[0].num_prefill < sizes[1].num_prefill < sizes[2].num_prefill
    assert len({each.num_decode for each in sizes}) == 1


def test_a_tighter_target_for_tokens_takes_more_decode_workers():
    sizes = [
        sizes_for(PROFILE, Demand(30.0, 1000, 100), NONE, Targets(0.5, itl), is_apart=True, most=50)
        for itl in (0.04, 0.02, 0.013)
    ]
    assert sizes[0].num_decode < sizes[1].num_decode < sizes[2].num_decode
    assert len({each.num_prefill for each in sizes}) == 1


def test_a_target_that_no_worker_holds_is_named_and_the_load_is_carried():
    sizes = sizes_for(PROFILE, Demand(30.0, 1000, 100), NONE, Targets(0.05, 0.001), is_apart=True, most=50)
    assert "ttft 0.05" in sizes.why_not and "itl 0.001" in sizes.why_not
    assert 3 <= sizes.num_prefill <= 4 and sizes.num_decode < 10


def test_seconds_are_seconds():
    """The reference compared a TTFT in seconds with the profile's milliseconds, which made prefill a thousandth
    of what was needed."""
    clients = Clients(workers=2, prefill=4, settings=config(no_correction=False))
    clients.ask(100, rate=30.0, ttft=0.15, itl=0.02)
    assert clients.counts["prefill"] >= 3


# What is foretold


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_constant_series_stays_as_it_is(name):
    assert predict(name, [5.0] * 40, 4, 10) == pytest.approx([5.0] * 4, rel=1e-3)
    assert predict(name, [5.0], 2, 10) == [5.0, 5.0]


@pytest.mark.parametrize("name", PREDICTORS)
def test_nothing_below_zero_is_foretold(name):
    values = [100.0 - 5 * n for n in range(20)]
    assert min(predict(name, values, 10, 5)) >= 0.0


@pytest.mark.parametrize("name", ["linear", "kalman"])
def test_a_trend_goes_on(name):
    found = predict(name, [10.0 + 2 * n for n in range(30)], 3)
    assert found == pytest.approx([70.0, 72.0, 74.0], rel=0.02)


def test_a_season_comes_again():
    season = [1.0, 4.0, 9.0, 4.0, 2.0]
    assert predict("holt_winters", season * 8, 5, 5) == pytest.approx(season, rel=0.05)
    assert predict("holt_winters", season, 5, 5) == predict("linear", season, 5)


@pytest.mark.parametrize("season", [2, 3, 6, 9, 11])
def test_a_series_of_any_length_has_a_forecast(season):
    """Regression: a season of fewer than ten intervals ended the planner after two of them."""
    for num_values in range(1, least_points(season) + 2):
        values = [10.0 + number % season for number in range(num_values)]
        found = predict("holt_winters", values, 3, season)
        assert len(found) == 3 and max(found) < 30


def test_a_missing_package_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr(predictors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[planner\]'"):
        config(load_predictor="kalman")
    config(load_predictor="linear")


# The slow loop


def test_a_fleet_is_sized_for_what_is_asked():
    assert Clients(workers=1).ask(30, rate=30.0) == {"both": 5}
    few = Clients(workers=1).ask(30, rate=3.0)
    assert few == {"both": 1}


def test_both_roles_are_sized_at_once():
    clients = Clients(workers=1, prefill=1)
    clients.ask(16, rate=30.0)
    [change] = [decision.changes for decision in clients.decisions if decision.changes]
    assert {each.role for each in change} == {"prefill", "decode"} and max(each.count for each in change) > 1


def test_long_prompts_take_prefill_and_long_answers_decode_workers():
    base, long_in, long_out = (
        Clients(workers=2, prefill=2).ask(40, rate=20.0, tokens=tokens, generated=generated)
        for tokens, generated in ((1000, 100), (3000, 100), (1000, 400))
    )
    assert long_in["prefill"] > base["prefill"] and long_out["prefill"] == base["prefill"]
    assert long_out["decode"] > base["decode"]


def test_workers_change_their_role_where_one_role_shrinks_and_the_other_grows():
    """Too few of six workers, within a budget of six, are for prefill."""
    clients = Clients(workers=5, prefill=1, settings=config(change_roles=True, max_gpu_budget=6))
    clients.ask(60, rate=20.0, tokens=4000, generated=10)
    assert any(decision.moves for decision in clients.decisions)
    for decision in clients.decisions:
        assert len({change.count > 0 for change in decision.changes}) < 2
    plain = Clients(workers=5, prefill=1, settings=config(max_gpu_budget=6))
    assert plain.ask(60, rate=20.0, tokens=4000, generated=10) == clients.counts


def test_the_interval_is_that_of_the_configuration():
    clients = Clients(settings=config(adjustment_interval=30.0))
    clients.ask(60, rate=20.0)
    grown = [decision.at for decision in clients.decisions if decision.changes]
    assert grown == [35.0]  # 30 s after the first look, when the quick loop comes


@pytest.mark.parametrize("pulling, adjustment, quick", [(1, 10, 5), (0.5, 3, 3), (8, 60, 8)])
def test_the_quick_loop_fits_the_other_intervals_unless_it_is_given(pulling, adjustment, quick):
    """A default that nobody had written was refused."""
    found = PlannerConfig(
        mode="sla", metric_pulling_interval=float(pulling), adjustment_interval=float(adjustment)
    )
    assert found.judging_interval == quick


def test_it_grows_ahead_of_a_rising_load():
    """A worker that is started now serves after startup_time, when more is asked."""
    found = {}
    for name in ("constant", "linear"):
        clients = Clients(settings=config(load_predictor=name, startup_time=40.0))
        for step in range(6):
            clients.ask(10, rate=5.0 * (step + 1))
        found[name] = clients.counts["both"]
    assert found["linear"] > found["constant"]


def test_it_shrinks_when_that_was_enough_for_two_intervals_and_no_sooner():
    clients = Clients(workers=1)
    clients.ask(40, rate=30.0)
    large = clients.counts["both"]
    clients.ask(10, rate=3.0)
    assert clients.counts["both"] == large
    clients.ask(20, rate=3.0)
    assert clients.counts["both"] < large


def test_it_shrinks_an_interval_after_a_rush_where_workers_start_at_once():
    """All numbers that had ever been enough were remembered, and the fleet never shrank."""
    clients = Clients(settings=config(startup_time=0.0))
    high = clients.ask(60, rate=40)["both"]
    low = clients.ask(60, rate=2)["both"]
    assert low < high and low == Clients(settings=config(startup_time=0.0)).ask(60, rate=2)["both"]


def test_a_load_at_the_edge_of_two_sizes_does_not_swing():
    """A worker goes only if the others hold tighter targets, too."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    demand = next(
        rate / 10
        for rate in range(10, 1000)
        if sizes_for(PROFILE, Demand(rate / 10, 1000, 100), NONE, TARGETS, is_apart=False, most=20).num_decode
        > 3
    )
    clients = Clients(workers=3)
    clients.ask(30, rate=1.02 * demand)
    sizes = []
    for _ in range(20):
        clients.ask(10, rate=demand * rng.uniform(0.97, 1.02))
        sizes.append(clients.counts["both"])
    assert set(sizes) == {4}


def test_nobody_asks_and_the_least_number_stays():
    clients = Clients(workers=3)
    clients.ask(30, rate=10.0)
    assert clients.ask(60) == {"both": 1}


def test_one_worker_that_answers_stays_and_prefill_comes_back_from_zero():
    """A router without any refuses requests, so none would wait that could bring one back."""
    clients = Clients(workers=3, prefill=2, settings=config(min_endpoint=0, no_correction=False))
    clients.ask(30, rate=10.0)
    assert clients.ask(60) == {"decode": 1, "prefill": 0}
    clients.counts["decode"] = 0
    assert clients.ask(5) == {"decode": 1, "prefill": 0}
    assert clients.ask(30, rate=10.0)["prefill"] >= 1


def test_before_anybody_has_asked_the_fleet_stays_as_it_is():
    assert Clients(workers=3).ask(60) == {"both": 3}


def test_workers_that_come_or_go_put_a_plan_off_and_do_not_cancel_it():
    clients = Clients(workers=1)
    clients.ask(5, rate=30.0)
    clients.pending = 1
    clients.ask(15, rate=30.0)
    assert clients.counts == {"both": 1}
    clients.pending = 0
    assert clients.ask(5, rate=30.0)["both"] == 5


# Corrections


@pytest.mark.parametrize("is_apart", [False, True])
def test_slower_than_the_profile_takes_more_workers_and_quicker_fewer(is_apart):
    """The reference's factor min(1, observed / expected) can only lower the number of prefill workers."""
    found = {}
    for ttft in (0.03, 0.15, 0.45):
        clients = Clients(workers=4, prefill=4 if is_apart else 0, settings=config(no_correction=False))
        clients.ask(200, rate=20.0, ttft=ttft, itl=0.015)
        found[ttft] = clients.counts["prefill" if is_apart else "both"]
    assert found[0.03] < found[0.15] < found[0.45]


def test_slower_tokens_take_more_decode_workers():
    found = []
    for itl in (0.012, 0.03):
        clients = Clients(workers=3, prefill=4, settings=config(no_correction=False, itl=0.04))
        clients.ask(100, rate=20.0, itl=itl)
        found.append(clients.counts["decode"])
    assert found[0] < found[1]


def test_an_overload_teaches_nothing():
    """Requests that waited in a queue say nothing of how long a prompt takes."""
    clients = Clients(workers=1, settings=config(no_correction=False, max_gpu_budget=1))
    clients.ask(100, rate=30.0, ttft=20.0, itl=1.0)
    assert clients.state.sla.prefill_correction == clients.state.sla.decode_correction == 1.0


def test_a_profile_that_falls_to_nothing_beyond_its_points_teaches_nothing():
    """Noise of the last two points alone may have the line go down."""
    data = msgspec.structs.replace(DATA, prefill=[PrefillPoint(900, 0.1), PrefillPoint(1000, 0.06)])
    settings = config(no_correction=False)
    clients = Clients(workers=2, prefill=2, settings=settings, profile=EngineProfile(data))
    clients.ask(100, rate=1.0, tokens=4000)
    assert clients.state.sla.prefill_correction == 1.0


def test_corrections_have_bounds_and_can_be_switched_off():
    slow = Clients(workers=10, settings=config(no_correction=False))
    slow.ask(400, rate=1.0, ttft=1000.0, itl=0.0101)
    assert slow.state.sla.prefill_correction <= 10.0 and slow.state.sla.decode_correction >= 0.1
    off = Clients(workers=10)
    off.ask(100, rate=1.0, ttft=1000.0)
    assert off.state.sla.prefill_correction == 1.0


# The quick loop


def test_a_target_that_is_missed_now_adds_workers_before_the_interval_ends():
    clients = Clients(workers=1, settings=config(adjustment_interval=60.0))
    clients.ask(60, rate=3.0)
    assert clients.counts == {"both": 1}
    clients.ask(10, rate=20.0, ttft=1.0)
    assert (
        clients.counts["both"] >= 4
        and "first token takes 1 s > 0.5" in clients.decisions[-1].reason + clients.decisions[-2].reason
    )


def test_slow_first_tokens_add_prefill_and_slow_tokens_decode_workers():
    for more, role in (({"ttft": 0.9}, "prefill"), ({"itl": 0.09}, "decode")):
        clients = Clients(workers=2, prefill=2, settings=config(adjustment_interval=60.0))
        clients.ask(60, rate=5.0)
        before = dict(clients.counts)
        clients.ask(5, rate=5.0, **more)
        assert {name for name, count in clients.counts.items() if count > before[name]} == {role}


def test_what_an_idle_worker_misses_does_not_add_workers_for_ever():
    clients = Clients(workers=1, settings=config(ttft=0.05))
    clients.ask(200, rate=2.0, ttft=0.2)
    assert clients.counts == {"both": 1}


def test_two_slow_requests_are_no_reason():
    clients = Clients(workers=1, settings=config(adjustment_interval=60.0))
    clients.ask(60, rate=3.0)
    clients.ask(5, rate=0.4, ttft=3.0)
    assert clients.counts == {"both": 1}


def test_requests_that_wait_while_nothing_comes_are_a_reason():
    clients = Clients(workers=1, settings=config(adjustment_interval=60.0))
    clients.ask(60, rate=3.0)
    clients.queued = 9
    assert clients.ask(5) == {"both": 2}


# The budget


def test_the_budget_is_never_exceeded_by_rounding():
    """The reference rounds both roles, and each up where min_endpoint says so."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(60):
        budget = rng.randint(2, 12)
        sizes = {"prefill_engine_num_gpu": rng.randint(1, 3), "decode_engine_num_gpu": rng.randint(1, 3)}
        if sum(sizes.values()) > budget:
            continue
        clients = Clients(workers=1, prefill=1, settings=config(max_gpu_budget=budget, **sizes))
        clients.other_gpus = rng.randint(0, budget - sum(sizes.values()))
        clients.ask(40, rate=rng.uniform(5, 60), generated=rng.randint(10, 300))
        gpus = sum(clients.config.gpus_of(role) * count for role, count in clients.counts.items())
        assert gpus + clients.other_gpus <= budget and min(clients.counts.values()) >= 1


def test_a_budget_that_is_too_small_is_shared_in_proportion_and_named():
    clients = Clients(workers=1, prefill=1, settings=config(max_gpu_budget=6))
    clients.ask(40, rate=60.0, generated=20)
    assert sum(clients.counts.values()) == 6 and clients.counts["prefill"] > clients.counts["decode"]
    assert any("6 are left of the budget" in decision.reason for decision in clients.decisions)


def test_a_budget_that_another_models_changes_take_for_a_while_costs_no_worker():
    """Changes in flight count with the larger number of GPUs."""
    clients = Clients(workers=5, settings=config(max_gpu_budget=8))
    clients.other_gpus = 3
    assert clients.ask(60, rate=30.0) == {"both": 5}
    clients.other_gpus = 5
    assert clients.ask(60, rate=30.0) == {"both": 5}
    assert clients.ask(60, rate=40.0) == {"both": 5} and "3 are left" in clients.decisions[-2].reason
    assert clients.ask(60, rate=0.0) == {"both": 1}


def test_nobody_goes_to_make_room_for_a_worker_who_is_not_added_now():
    """Prefill has too many of a budget that is too small; of decode none starts."""
    settings = config(max_gpu_budget=6)
    clients = Clients(workers=1, prefill=5, settings=settings)
    look = clients.look
    clients.look = lambda: msgspec.structs.replace(look(), failures=[Failure("decode", 1, 9, clients.now)])
    assert clients.ask(60, rate=60.0, generated=200) == {"decode": 1, "prefill": 5}
    assert Clients(workers=1, prefill=5, settings=settings).ask(60, rate=60.0, generated=200)["decode"] > 1


def test_a_budget_that_others_have_taken_changes_no_role_for_another():
    clients = Clients(workers=1, prefill=5, settings=config(max_gpu_budget=6))
    clients.other_gpus = 2
    assert clients.ask(60, rate=60.0, generated=200) == {"decode": 1, "prefill": 5}


def test_a_change_that_has_failed_waits_in_this_mode_too():
    clients = Clients(workers=1)
    look = clients.look
    clients.look = lambda: msgspec.structs.replace(look(), failures=[Failure("both", 1, 1, 30.0)])
    assert clients.ask(45, rate=30.0) == {"both": 1}
    assert clients.ask(20, rate=30.0) == {"both": 5}


def test_workers_that_a_person_added_are_counted():
    clients = Clients(workers=1)
    clients.ask(30, rate=10.0)
    clients.counts["both"] += 2
    clients.ask(30, rate=10.0)
    assert clients.counts == Clients(workers=1).ask(60, rate=10.0)


# Profiles


def test_between_points_lines_are_drawn():
    assert PROFILE.ttft_s(550) == pytest.approx(0.055) and PROFILE.ttft_s(50) == pytest.approx(0.01)
    assert PROFILE.ttft_s(8000) == pytest.approx(0.8)  # the reference would say 0.4, as of 4,000 tokens
    assert PROFILE.itl_s(0.75, 500) == pytest.approx(0.04) == PROFILE.itl_s(0.75, 1234)
    assert PROFILE.itl_s(0.0, 500) == pytest.approx(0.0108)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    write_profile(tmp_path / "p.json", DATA)
    assert read_profile(tmp_path / "p.json").data == DATA


def test_the_simulators_shapes_have_profiles():
    timing = find_timing("h200", "qwen3-8b")
    profile = EngineProfile(profile_of("h200", "qwen3-8b", 1024, timing.cache_tokens(0.9)))
    assert profile.ttft_s(1024) == pytest.approx(timing.prompt_s(1024, 16384))
    assert 0.005 < profile.itl_s(0.1, 3000) < profile.itl_s(0.8, 3000) < 0.05


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"max_kv_tokens": 0}, "max_kv_tokens must be at least 1, got 0"),
        ({"prefill": []}, "two prefill points and one decode point, got 0 and 6"),
        ({"prefill": [PrefillPoint(100, 0.1), PrefillPoint(100, 0.2)]}, "input_length 100 must appear once"),
        ({"prefill": [PrefillPoint(100, 0.1), PrefillPoint(900, 0.01)]}, "more work in less than half"),
        (
            {"prefill": [PrefillPoint(100, -0.1), PrefillPoint(900, 0.1)]},
            "of a prefill point must be above 0",
        ),
        ({"decode": [DecodePoint(500, 1.5, 0.1, 3000.0)]}, "kv_usage must be from 0 to 1"),
        ({"decode": [DecodePoint(500, 0.5, 10.0, 10_000.0)]}, "contradicts itself"),  # milliseconds, say
        ({"max_kv_tokens": 10 * KV_TOKENS}, "contradicts itself"),
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_is_refused(tmp_path, change, wrong):
    write_profile(tmp_path / "p.json", msgspec.structs.replace(DATA, **change))
    with pytest.raises(ConfigError, match=wrong) as error:
        read_profile(tmp_path / "p.json")
    assert "p.json" in str(error.value)


FILE = '[[workers]]\n[planner]\nenabled = true\nmode = "sla"\n'


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (FILE, "needs profile"),
        (FILE + 'profile = "nowhere.json"\n', "'nowhere.json' cannot be read"),
        (FILE + 'profile = { other = "p.json" }\n', "must have a file for 'smollm2', got only other"),
        (FILE + "profile = 3\n", "profile must be of the type "),
        (FILE + "ttft = 0.0\n", "ttft"),
        (FILE + 'load_predictor = "prophet"\n', "load_predictor must be one of "),
        (FILE + 'load_predictor = "holt_winters"\n', "load_season 0"),
        (
            FILE + 'load_predictor = "holt_winters"\nload_season = 3600\n',
            "no room for the 720 intervals that a season of 360",
        ),
        (FILE + "load_adjustment_interval = 60.0\n", "load_adjustment_interval 60"),
    ],
)
def test_mistakes_are_named_before_anything_starts(tmp_path, text, wrong):
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_fleet_file(tmp_path / "fleet.toml")
    assert wrong in str(error.value)


# The record


def test_a_record_gives_the_same_decisions_again(tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    write_profile(tmp_path / "p.json", DATA)
    settings = config(profile=str(tmp_path / "p.json"), load_predictor="linear", no_correction=False)
    clients = Clients(workers=1, prefill=1, settings=settings)
    for _ in range(40):
        clients.pending = int(rng.random() < 0.2)
        ttft, itl = rng.uniform(0.1, 0.6), rng.uniform(0.01, 0.06)
        clients.ask(5, rng.uniform(0, 40), rng.randint(1, 3000), rng.randint(1, 300), ttft, itl)
    lines = [msgspec.json.encode(line) for line in clients.lines]
    assert any(decision.changes for decision in clients.decisions)
    assert [entry.decision for entry in replay(settings, lines)] == clients.decisions


def test_a_state_travels_as_json():
    clients = Clients(workers=2)
    clients.ask(40, rate=10.0)
    state = clients.state.sla
    assert state.history and msgspec.json.decode(msgspec.json.encode(state), type=SlaState) == state


# Traffic


def test_traffic_is_the_difference_of_two_sums():
    before, now = Traffic(), Traffic()
    for traffic in (before, now):
        traffic.arrived(10)
    now.arrived(30)
    now.began(0.5)
    now.ended(5, 0.4)
    found = now.since(before)
    assert (found.num_requests, found.mean_input, found.mean_ttft_s, found.mean_output) == (1, 30.0, 0.5, 5.0)
    assert found.mean_itl_s == pytest.approx(0.1)
    assert Traffic().since(now) == Traffic()  # the router started again
    assert Traffic().mean_itl_s is None and Traffic().mean_ttft_s is None


def test_an_answer_of_one_token_has_no_gap():
    traffic = Traffic()
    traffic.ended(1, 0.0)
    assert traffic.mean_itl_s is None and traffic.mean_output == 1.0
