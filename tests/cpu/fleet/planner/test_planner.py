"""Each rule of the planner, the faults of the reference's planner, and that a record gives the same decisions
again."""

import random

import msgspec
import pytest

from shoal.errors import ConfigError
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.observation import CountChange, Decision, DecodeLoad, Failure, Move, Observation
from shoal.fleet.planner.planner import Planner, PlannerState, Recorded, decide, replay

CONFIG = PlannerConfig(enabled=True)
GROW, SHRINK = CountChange("decode", 1), CountChange("decode", -1)


def seen(*usages, prefill=1, queue=0, at=0.0, role="decode", waiting=0, **more):
    loads = [DecodeLoad(usage, waiting) for usage in usages]
    return Observation(
        at=at, decode=loads, decode_role=role, prefill_workers=prefill, prefill_queue=queue, **more
    )


def changes(*observations, config=CONFIG, grace=0, other_gpus=0):
    decision, _ = decide(config, PlannerState(grace), observations, other_gpus=other_gpus)
    return decision.changes


def with_queue(*lengths, **more):
    return [seen(0.7, queue=length, **more) for length in lengths]


def test_defaults_are_those_of_the_references_code():
    assert (CONFIG.adjustment_interval, CONFIG.metric_pulling_interval) == (10.0, 1.0)
    assert (CONFIG.max_gpu_budget, CONFIG.min_endpoint) == (8, 1)
    assert (CONFIG.decode_kv_scale_up_threshold, CONFIG.decode_kv_scale_down_threshold) == (0.9, 0.5)
    assert CONFIG.prefill_queue_scale_up_threshold == 5.0
    assert CONFIG.prefill_queue_scale_down_threshold == 0.2


def test_nothing_changes_between_the_thresholds():
    assert changes(seen(0.7, queue=1), seen(0.8, queue=2)) == []


def test_thresholds_themselves_change_nothing():
    assert changes(seen(0.9, queue=5)) == []
    assert changes(seen(0.5, 0.5, queue=1)) == []


def test_decode_grows_above_its_kv_load():
    assert changes(seen(0.9, queue=1), seen(0.95, queue=1)) == [GROW]


def test_waiting_requests_count_in_the_kv_load():
    assert changes(seen(0.85, queue=1, waiting=3)) == [GROW]  # 0.85 + 3 * 0.02


def test_waiting_requests_of_a_worker_without_slots_do_not_count():
    loads = [DecodeLoad(0.85, 3, has_slots=False)]
    assert changes(Observation(at=0, decode=loads, prefill_workers=1, prefill_queue=1)) == []


def test_requests_that_the_router_holds_count_as_waiting():
    assert changes(seen(0.85, 0.85, queue=1, queued=10)) == [GROW]  # five each


def test_decode_shrinks_below_its_kv_load():
    assert changes(seen(0.1, 0.2, 0.1, queue=1)) == [SHRINK]


def test_the_last_worker_stays():
    assert changes(seen(0.0, queue=1)) == []


def test_a_worker_stays_whose_load_the_others_could_not_carry():
    """0.48 on each of two would be 0.96 on one, which would be two again: the reference swings here."""
    assert changes(seen(0.48, 0.48, queue=1)) == []
    assert changes(seen(0.48, 0.48, queue=1), config=PlannerConfig(checks_remaining_load=False)) == [SHRINK]


def test_prefill_grows_when_its_queue_is_long_and_stays_so():
    assert changes(*with_queue(6, 7, 8)) == [CountChange("prefill", 1)]


def test_prefill_does_not_grow_when_its_queue_is_on_its_way_down():
    assert changes(*with_queue(12, 9, 6)) == []  # 6 - 3 * 6 < 5 three intervals ahead


def test_prefill_shrinks_when_its_queue_is_empty():
    assert changes(*with_queue(0, 0, prefill=2)) == [CountChange("prefill", -1)]


def test_after_growing_decode_does_not_shrink_for_three_whole_intervals():
    """The reference counts the interval that added the worker as the first of three."""
    decision, state = decide(CONFIG, PlannerState(), [seen(0.99, queue=1)])
    assert decision.changes == [GROW]
    found = []
    for _ in range(5):
        decision, state = decide(CONFIG, state, [seen(0.1, 0.1, queue=1)])
        found.append(decision.changes)
    assert found == [[], [], [], [SHRINK], [SHRINK]]


def test_an_interval_without_a_decision_is_none_of_the_grace():
    decision, state = decide(CONFIG, PlannerState(3), [seen(0.1, 0.1, queue=1, pending=1)])
    assert decision.changes == [] and state.grace == 3


def test_decode_may_grow_in_its_grace_unless_that_freezes_both_directions():
    assert changes(seen(0.99, queue=1), grace=2) == [GROW]
    assert changes(seen(0.99, queue=1), grace=2, config=PlannerConfig(grace_freezes_both=True)) == []


def test_the_budget_is_never_exceeded_and_the_reason_says_so():
    config = PlannerConfig(max_gpu_budget=3)
    decision, _ = decide(config, PlannerState(), [seen(0.99, 0.99, queue=1)])
    assert decision.changes == [] and "3 GPUs" in decision.reason


def test_engines_of_several_gpus_count_with_all_of_them():
    config = PlannerConfig(max_gpu_budget=8, decode_engine_num_gpu=4)
    assert changes(seen(0.99, queue=1), config=config) == []  # 1 + 4 + 4 > 8
    assert changes(seen(0.99, queue=1), config=PlannerConfig(decode_engine_num_gpu=4, max_gpu_budget=9)) == [
        GROW
    ]


def test_other_models_share_the_budget():
    assert changes(seen(0.99, queue=1), other_gpus=6) == []
    assert changes(seen(0.99, queue=1), other_gpus=5) == [GROW]


def test_both_roles_together_stay_within_the_budget():
    """The reference counts GPUs once, before it adds for either role."""
    config = PlannerConfig(max_gpu_budget=3)
    assert changes(*[seen(0.99, queue=length) for length in (6, 7)], config=config) == [
        CountChange("prefill", 1)
    ]


def test_what_is_removed_makes_room_for_what_is_added():
    config = PlannerConfig(max_gpu_budget=3)
    assert changes(seen(0.99, prefill=2, queue=0), config=config) == [CountChange("prefill", -1), GROW]


def test_a_role_that_shrinks_gives_its_worker_to_one_that_grows():
    config = PlannerConfig(max_gpu_budget=3, change_roles=True)
    decision, _ = decide(config, PlannerState(), [seen(0.99, prefill=2, queue=0)])
    assert (decision.moves, decision.changes) == ([Move("prefill", "decode", 1)], [])
    assert decision.desired == {"decode": 2, "prefill": 1}
    back = [seen(0.1, 0.1, prefill=1, queue=length) for length in (6, 7)]
    decision, _ = decide(config, PlannerState(), back)
    assert (decision.moves, decision.changes) == ([Move("decode", "prefill", 1)], [])


def test_a_role_that_alone_shrinks_or_grows_changes_no_other():
    config = PlannerConfig(change_roles=True)
    for observation in (seen(0.99, queue=1), seen(0.7, prefill=2, queue=0)):
        decision, _ = decide(config, PlannerState(), [observation])
        assert decision.moves == [] and len(decision.changes) == 1


def test_a_worker_that_has_become_a_decode_worker_is_in_its_grace():
    config = PlannerConfig(change_roles=True)
    _, state = decide(config, PlannerState(), [seen(0.99, prefill=2, queue=0)])
    assert state.grace == 3


@pytest.mark.parametrize("pending", [1, 3])
def test_nothing_is_decided_while_workers_come_or_go_or_are_missing(pending):
    assert changes(seen(0.99, queue=1, pending=pending)) == []


def test_nothing_is_decided_while_an_operator_has_workers_rest():
    """A fleet may be paused for new weights, and a new worker would serve the old ones."""
    config = PlannerConfig(max_gpu_budget=4)
    decision, _ = decide(config, PlannerState(), [seen(0.99, queue=1, paused=1)])
    assert decision.changes == [] and "paused" in decision.reason
    assert changes(seen(prefill=0, role="both", paused=1), config=config) == []


def test_a_worker_that_drains_keeps_its_gpus_and_is_replaced_where_the_budget_allows():
    draining = seen(prefill=0, role="both", draining=1)
    assert changes(draining, config=PlannerConfig(max_gpu_budget=1)) == []
    assert changes(draining, config=PlannerConfig(max_gpu_budget=2)) == [CountChange("both", 1)]
    planner = Planner(PlannerConfig(max_gpu_budget=3))
    planner.see("a", seen(0.99, prefill=0, role="both"))
    planner.see("b", seen(0.7, prefill=0, role="both", draining=1))
    assert [judged.decision.changes for judged in planner.judge()] == [[], []]


def test_nothing_is_decided_over_an_interval_in_which_the_number_of_workers_changed():
    assert changes(seen(0.99, queue=1), seen(0.99, 0.99, queue=1)) == []


def test_workers_that_a_person_added_are_taken_as_they_are():
    decision, _ = decide(CONFIG, PlannerState(), [seen(0.7, 0.7, 0.7, 0.7, queue=1)])
    assert decision.changes == [] and decision.desired == {"decode": 4, "prefill": 1}


def test_a_worker_for_both_follows_the_rules_of_decode():
    up = seen(0.99, prefill=0, role="both")
    assert changes(up) == [CountChange("both", 1)]
    assert changes(seen(0.1, 0.1, prefill=0, role="both")) == [CountChange("both", -1)]


def test_without_any_worker_no_average_is_made_and_the_least_number_is_started():
    """In the reference the mean of an empty list is NaN, for which all comparisons are false."""
    assert changes(seen(prefill=0, role="both")) == [CountChange("both", 1)]
    assert changes(seen(prefill=0, queue=0)) == [GROW, CountChange("prefill", 1)]


def test_one_worker_that_answers_stays_and_comes_back_whatever_the_least_number_is():
    """A router without any refuses requests, so none would wait that could bring one back."""
    config = PlannerConfig(min_endpoint=0, checks_remaining_load=False)
    assert changes(seen(0.0, prefill=0, role="both"), config=config) == []
    assert changes(seen(prefill=0, role="both"), config=config) == [CountChange("both", 1)]
    assert changes(seen(0.0), config=config) == [CountChange("prefill", -1)]
    assert changes(seen(prefill=0), config=config) == [GROW]


def test_prefill_comes_back_from_zero_when_prompts_wait_at_those_that_decode():
    config = PlannerConfig(min_endpoint=0)
    assert changes(seen(0.6, prefill=0, waiting=9), config=config) == [CountChange("prefill", 1)]
    assert changes(seen(0.6, prefill=0, waiting=2), config=config) == []
    last_gpu = PlannerConfig(min_endpoint=0, max_gpu_budget=2)  # the decode workers need both
    assert changes(seen(0.97, prefill=0, waiting=9), config=last_gpu) == [GROW]


def test_the_last_prefill_worker_goes_only_when_nobody_generates():
    """Others could carry no load at all: a fleet would grow and shrink between none and one."""
    config = PlannerConfig(min_endpoint=0)
    assert changes(seen(0.6), config=config) == []
    assert changes(seen(0.0), config=config) == [CountChange("prefill", -1)]


def test_the_decision_says_why_and_what_is_wanted():
    decision, _ = decide(CONFIG, PlannerState(), [seen(0.95, queue=1, at=20.0)])
    assert decision.at == 20.0 and decision.desired == {"decode": 2, "prefill": 1}
    assert "0.95 > 0.9" in decision.reason


def test_a_change_that_failed_waits_twice_as_long_each_time():
    for times, wait_s in ((1, 20), (2, 40), (3, 80), (6, 600), (5000, 600)):
        failures = [Failure("decode", 1, times, 100.0), Failure("decode", -1, 1, 100.0)]
        early, late = (seen(0.99, queue=1, at=100.0 + s, failures=failures) for s in (wait_s - 1, wait_s))
        decision, _ = decide(CONFIG, PlannerState(), [early])
        assert decision.changes == [] and decision.desired == {"decode": 1, "prefill": 1}
        assert f"to add a decode worker has failed {times} times" in decision.reason
        assert changes(late) == [GROW]


def test_an_addition_that_waits_begins_no_grace():
    config = PlannerConfig(grace_freezes_both=True)
    waiting = seen(0.95, queue=1, at=110.0, failures=[Failure("decode", 1, 1, 100.0)])
    for before, after in ((0, 0), (2, 1)):
        decision, state = decide(config, PlannerState(before), [waiting])
        assert decision.changes == [] and state.grace == after
    assert changes(seen(0.95, queue=1, at=121.0), config=config) == [GROW]


def test_what_needs_the_room_of_a_worker_whose_removal_waits_is_left_out_too():
    failures = [Failure("prefill", -1, 1, 100.0)]
    observation = seen(0.99, prefill=2, queue=0, at=101.0, failures=failures)
    decision, _ = decide(PlannerConfig(max_gpu_budget=3), PlannerState(), [observation])
    assert decision.changes == [] and "no decode worker is added in its place" in decision.reason
    assert changes(observation, config=PlannerConfig(max_gpu_budget=4)) == [GROW]


def test_a_change_of_role_waits_for_itself_alone():
    config = PlannerConfig(max_gpu_budget=3, change_roles=True)
    for count, made in (
        (1, ([Move("prefill", "decode", 1)], [])),
        (-1, ([Move("prefill", "decode", 1)], [])),
        (0, ([], [CountChange("prefill", -1), GROW])),
    ):
        failures = [Failure("decode" if count > 0 else "prefill", count, 1, 100.0)]
        observation = seen(0.99, prefill=2, queue=0, at=101.0, failures=failures)
        decision, _ = decide(config, PlannerState(), [observation])
        assert (decision.moves, decision.changes) == made
        assert decision.desired == {"decode": 2, "prefill": 1}


@pytest.mark.parametrize(
    "observation, grace, config, why",
    [
        (seen(0.7, queue=1), 0, CONFIG, "the load is between the thresholds"),
        (seen(0.0, queue=1), 0, CONFIG, "KV load is 0.00 < 0.5, but 1 is the least number of decode workers"),
        (
            seen(0.1, 0.1, queue=1),
            2,
            CONFIG,
            "KV load is 0.10 < 0.5, but none is removed in the 3 intervals after",
        ),
        (seen(0.48, 0.48, queue=1), 0, CONFIG, "KV load is 0.48 < 0.5, but the others could not carry"),
        (seen(0.7), 0, CONFIG, "prefill queue is 0.00 < 0.2, but 1 is the least number of prefill"),
        (
            seen(0.7),
            0,
            PlannerConfig(min_endpoint=0),
            "prefill queue is 0.00 < 0.2, but the others could not",
        ),
        (
            seen(0.99, queue=1),
            2,
            PlannerConfig(grace_freezes_both=True),
            "KV load is 0.99 > 0.9, but one was",
        ),
    ],
)
def test_the_decision_says_what_keeps_a_fleet_as_it_is(observation, grace, config, why):
    """Regression: the reason was always that the load is between the thresholds."""
    decision, _ = decide(config, PlannerState(grace), [observation])
    assert decision.changes == [] and why in decision.reason


def test_the_decision_says_that_a_long_prefill_queue_is_on_its_way_down():
    decision, _ = decide(CONFIG, PlannerState(), with_queue(12, 9, 6))
    assert decision.reason == "the prefill queue is 9.00 > 5, but decreasing"


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"max_gpu_budget": 0}, "max_gpu_budget"),
        ({"min_endpoint": -1}, "min_endpoint"),
        ({"adjustment_interval": 0.0}, "adjustment_interval"),
        ({"adjustment_interval": 0.5}, "metric_pulling_interval"),
        ({"metric_pulling_interval": 1e-9}, "metric_pulling_interval"),
        ({"load_season": 1e308}, "load_season"),
        ({"startup_time": 1e308}, "startup_time"),
        ({"mode": "guess"}, "mode"),
        ({"decode_kv_scale_down_threshold": 0.9}, "decode_kv_scale_down_threshold"),
        ({"change_roles": True, "connector": "virtual"}, "change_roles"),
        ({"change_roles": True, "prefill_engine_num_gpu": 2}, "prefill_engine_num_gpu is 2"),
        ({"prefill_queue_scale_up_threshold": float("nan")}, "prefill_queue_scale_up_threshold"),
    ],
    ids=str,
)
def test_impossible_settings_are_named(wrong, named):
    with pytest.raises(ConfigError, match=named):
        PlannerConfig(**wrong)


def test_a_record_gives_the_same_decisions_again():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lines, made = [], []
    states = {"a": PlannerState(), "b": PlannerState()}
    counts = {"a": [1, 1], "b": [2, 0]}
    for _ in range(200):
        for model, (decode, prefill) in counts.items():
            role = "decode" if prefill else "both"
            interval = []
            for _ in range(rng.randrange(1, 4)):
                usages = [round(rng.random(), 3) for _ in range(decode)]
                queue = rng.randrange(12) if prefill else 0
                interval.append(
                    seen(*usages, prefill=prefill, queue=queue, role=role, waiting=rng.randrange(9))
                )
            others = sum(sum(each) for name, each in counts.items() if name != model)
            decision, states[model] = decide(CONFIG, states[model], interval, other_gpus=others)
            for change in decision.changes:
                counts[model][change.role == "prefill"] += change.count
            made.append(decision)
            entries = [Recorded(model=model, observation=each) for each in interval]
            entries.append(Recorded(model=model, decision=decision, other_gpus=others))
            lines += [msgspec.json.encode(entry) for entry in entries]
            assert sum(map(sum, counts.values())) <= CONFIG.max_gpu_budget
    assert any(decision.changes for decision in made)
    assert [entry.decision for entry in replay(CONFIG, lines)] == made


@pytest.mark.parametrize(
    "line",
    [b'{"observation": 7}', b"[]", b'{"observation": {"at": 1, "decode": [], "decode_role": "prefill"}}'],
)
def test_a_line_that_is_no_record_is_named(line):
    with pytest.raises(ConfigError, match="line 2"):
        list(replay(CONFIG, [b"", line]))


def a_record(*, begins=True):
    """Lines of a planner that has decided once."""
    decision = Decision(at=1.0, changes=[], reason="", desired={})
    entries = [Recorded(model="m", observation=seen(0.95)), Recorded(model="m", decision=decision)]
    if begins:
        entries.insert(0, Recorded(config={}))
    return [msgspec.json.encode(entry) for entry in entries]


@pytest.mark.parametrize("length", [1, 10, 40])
def test_half_a_line_at_the_end_of_a_record_or_before_another_planner_is_passed_over_and_named(
    caplog, length
):
    """Regression: the replay ended with an error."""
    whole = a_record()
    half = whole[1][:length]
    assert len(list(replay(None, [*whole, half]))) == 1
    assert "line 4 of the record cannot be read" in caplog.text
    caplog.clear()
    assert len(list(replay(None, [*whole, half, b"", *whole, half, *whole]))) == 3
    assert "line 4 of" in caplog.text and "line 9 of" in caplog.text


def test_half_a_line_that_the_same_planner_goes_on_behind_is_an_error():
    half = a_record()[1][:20]
    for after in (a_record(begins=False), [half], [b"[]"]):
        with pytest.raises(ConfigError, match="line 4 of the record"):
            list(replay(None, [*a_record(), half, *after]))


def test_a_record_is_replayed_with_a_configuration_in_place_of_one_that_cannot_be_made_here():
    """Its predictor's library may be missing, or its options older."""
    decision, _ = decide(CONFIG, PlannerState(), [seen(0.95)], other_gpus=0)
    entries = [Recorded(model="m", observation=seen(0.95)), Recorded(model="m", decision=decision)]
    lines = [b'{"config": {"mode": "unknown"}}', *map(msgspec.json.encode, entries)]
    assert [entry.decision for entry in replay(CONFIG, lines)] == [decision] and decision.changes == [GROW]
    with pytest.raises(ConfigError, match=r"line 1 .* mode must be one of load, sla, got 'unknown'"):
        list(replay(None, lines))


def test_decisions_travel_as_json():
    decision = Decision(at=1.0, changes=[GROW], reason="x", desired={"decode": 2})
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
