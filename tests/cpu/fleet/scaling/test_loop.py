"""The planner at work on virtual time, with a connector that only counts."""

import asyncio
import copy
import dataclasses
import io

import msgspec
import pytest

from shoal.apps.fleet import open_record
from shoal.cli.main import main
from shoal.errors import UnavailableError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.connectors.connector import Component
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import write_profile
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.planner.planner import Recorded, replay
from shoal.fleet.pool.metrics import planner_metrics
from shoal.fleet.scaling.loop import PlannerLoop
from shoal.fleet.scaling.scaled_fleet import OwnFleet
from shoal.fleet.simulator.timing import profile_of
from shoal.fleet.traffic import Traffic
from shoal.fleet_views import WorkerState
from tests.fake_connector import FakeConnector

CONFIG = PlannerConfig(
    enabled=True, metric_pulling_interval=1.0, adjustment_interval=5.0, max_gpu_budget=3, start_timeout=60.0
)


class Counting(FakeConnector):
    """Models with workers of one role. `load`: KV load of all workers of a model together."""

    def __init__(self, start_s=20.0, **counts):
        super().__init__([Component(name, (), name, count=count) for name, count in counts.items()], start_s)
        self.load = dict.fromkeys(counts, 0.0)

    def show(self, view):
        self.view = view

    async def observe(self):
        counts = {name: self.count(name) for name in self.load}
        loads = {name: min(1.0, self.load[name] / max(1, count)) for name, count in counts.items()}
        return {
            name: Observation(at=0, decode=[DecodeLoad(loads[name])] * count, pending=self.pending(name))
            for name, count in counts.items()
        }

    @property
    def workers(self):
        return {name: self.count(name) for name in self.load}


def plan(connector, seconds, config=CONFIG, record=None, meanwhile=None):
    """Returns the planner's last view."""

    async def run():
        for component in connector.components:
            connector.states |= {
                f"{component.name}-{number}": WorkerState.READY for number in range(1, component.count + 1)
            }
        loop = PlannerLoop(config, connector, LoopClock(), record)
        running = asyncio.create_task(loop.run())
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return loop.view()

    return run_virtual(run())


def test_a_fleet_grows_to_its_load_and_shrinks_behind_it():
    connector = Counting(a=1)

    async def rush():
        connector.load["a"] = 2.8
        await asyncio.sleep(200)
        assert connector.workers == {"a": 3}
        connector.load["a"] = 0.1

    view = plan(connector, 200, meanwhile=rush)
    assert connector.workers == {"a": 1} and view.desired == {"both": 1} and not view.changing
    assert [one.what for one in view.decisions] == ["add 1 both"] * 2 + ["remove 1 both"] * 2
    ages = [one.age_s for one in view.decisions]
    assert ages == sorted(ages, reverse=True) and 200 < ages[0] < 400 and view.decisions[0].model == "a"


def test_a_disk_that_fails_for_a_while_ends_no_planner():
    """The connector keeps its state there."""

    class Shaky(Counting):
        failures = 0

        def pending(self, model):
            if self.failures < 7:
                self.failures += 1
                raise OSError(28, "No space left on device")
            return super().pending(model)

        async def add(self, model, role):
            if self.failures < 8:
                self.failures += 1
                raise OSError(28, "No space left on device")
            return await super().add(model, role)

    connector = Shaky(a=1)
    connector.load["a"] = 2.8
    plan(connector, 200)
    assert connector.workers == {"a": 3}


class Interrupted(Counting):
    """A fleet that cannot be observed between these seconds of the test."""

    def __init__(self, begin_s, end_s, **counts):
        super().__init__(**counts)
        self.begin_s, self.end_s = begin_s, end_s

    async def observe(self):
        if self.begin_s < asyncio.get_running_loop().time() < self.end_s:
            raise UnavailableError("the fleet does not answer")
        return await super().observe()


def test_after_a_gap_a_whole_interval_is_seen_before_anything_is_decided():
    """The first look behind it had decided alone."""
    connector, record = Interrupted(12.5, 52.5, a=1), io.BytesIO()
    connector.load["a"] = 0.7
    plan(connector, 70, record=record)
    lines = [msgspec.json.decode(line, type=Recorded) for line in record.getvalue().splitlines()]
    assert [line.decision.at for line in lines if line.decision is not None] == [5, 10, 57, 62, 67]


def test_a_record_with_a_gap_gives_the_same_decisions_again():
    """Observations before the gap are in the record, and were not judged."""
    connector, record = Interrupted(14.5, 20.5, a=1), io.BytesIO()
    connector.load["a"] = 2.8

    async def calm_down():
        await asyncio.sleep(15)
        connector.load["a"] = 0.7

    config = dataclasses.replace(CONFIG, no_operation=True)
    plan(connector, 60, config, record, calm_down)
    lines = [msgspec.json.decode(line, type=Recorded) for line in record.getvalue().splitlines()]
    made = [line.decision for line in lines if line.decision is not None]
    assert [line.decision for line in replay(config, record.getvalue().splitlines())] == made
    assert len(made) == 2 + 10 and made[2].changes == []


def test_decisions_fall_on_their_times_where_looks_do_not():
    config = dataclasses.replace(CONFIG, adjustment_interval=2.5)
    connector, record = Counting(a=1), io.BytesIO()
    connector.load["a"] = 0.7
    plan(connector, 21, config, record)
    lines = [msgspec.json.decode(line, type=Recorded) for line in record.getvalue().splitlines()]
    assert [line.decision.at for line in lines if line.decision] == [3, 5, 8, 10, 13, 15, 18, 20]


def test_a_record_on_a_full_disk_keeps_no_fleet_from_being_sized(caplog):
    connector = Counting(a=1)
    connector.load["a"] = 2.8
    with open_record(dataclasses.replace(CONFIG, record="/dev/full")) as record:
        plan(connector, 200, record=record)
    assert connector.workers == {"a": 3}
    assert caplog.text.count("the record cannot be written") == 1
    assert caplog.text.count("No space left on device") == 2  # and at its end


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b'{"config":{}}\n', b'{"config":{}}\n'), (b'{"half": 1', b'{"half": 1\n')],
)
def test_a_record_goes_on_with_a_new_line(tmp_path, before, after):
    """A planner had written on into the half line of one that was killed, so nothing could be replayed."""
    file = tmp_path / "record.jsonl"
    file.write_bytes(before)
    with open_record(dataclasses.replace(CONFIG, record=str(file))) as record:
        plan(Counting(a=1), 20, record=record)
    written = file.read_bytes()
    assert written.startswith(after + b'{"config":') and written.endswith(b"}\n")
    assert len(list(replay(None, written.splitlines()))) == 3


def test_one_change_at_a_time_and_none_while_it_is_under_way():
    connector = Counting(a=1, start_s=20.0)
    connector.load["a"] = 10.0
    plan(connector, 100)
    times = [time for time, _, _ in connector.changes]
    assert len(times) == 2 and times[1] - times[0] >= 20.0


def test_workers_of_one_decision_start_side_by_side(tmp_path):
    write_profile(tmp_path / "p.json", profile_of("h200", "qwen3-8b", 1024, 700_000))
    config = PlannerConfig(mode="sla", profile=str(tmp_path / "p.json"))
    connector, traffic = Counting(a=1, start_s=20.0), Traffic()

    async def observe():
        for _ in range(50):
            traffic.arrived(3000)
            traffic.began(0.2)
            traffic.ended(150, 1.5)
        return {"a": msgspec.structs.replace((await look())["a"], traffic=copy.copy(traffic))}

    look, connector.observe = connector.observe, observe
    plan(connector, 60, config)
    times = {time for time, _, _ in connector.changes}
    assert len(connector.changes) == 4 and len(times) == 1


class Apart:
    """A fleet of prefill and decode workers that are changed at once."""

    def __init__(self, **counts):
        self.counts, self.done = counts, []

    def show(self, view):
        pass

    async def observe(self):
        loads = [DecodeLoad(0.99)] * self.counts["decode"]
        return {
            "m": Observation(at=0, decode=loads, decode_role="decode", prefill_workers=self.counts["prefill"])
        }

    async def change_role(self, model, role, to):
        self.counts[role] -= 1
        self.counts[to] += 1
        self.done.append((role, to))
        return "m-1"


def test_a_worker_changes_its_role_where_one_role_shrinks_and_the_other_grows():
    fleet = Apart(prefill=3, decode=1)
    config = PlannerConfig(max_gpu_budget=4, change_roles=True)

    async def run():
        loop = PlannerLoop(config, fleet, LoopClock())
        planning = asyncio.create_task(loop.run())
        await asyncio.sleep(100)
        planning.cancel()
        return loop.view()

    assert run_virtual(run()).desired == {"prefill": 1, "decode": 3}
    assert fleet.done == [("prefill", "decode")] * 2


class Stuck(Apart):
    """No worker of it can be removed: a person has started them, say. `drain_s`: a removal takes so long, and is
    done."""

    drain_s = 0.0

    async def remove(self, model, role):
        self.done.append(("remove", role))
        if not self.drain_s:
            raise UnavailableError("the worker has not ended")
        await asyncio.sleep(self.drain_s)
        self.counts[role] -= 1
        return "m-1"

    async def add(self, model, role):
        self.done.append(("add", role))
        self.counts[role] += 1
        return "m-9"


def plan_stuck(seconds, max_gpu_budget, record=None, drain_s=0.0):
    """Prefill is to shrink and decode to grow."""
    fleet, config = Stuck(prefill=2, decode=1), PlannerConfig(max_gpu_budget=max_gpu_budget)
    fleet.drain_s = drain_s

    async def run():
        planning = asyncio.create_task(PlannerLoop(config, fleet, LoopClock(), record).run())
        await asyncio.sleep(seconds)
        planning.cancel()

    run_virtual(run())
    return fleet


def test_nothing_is_added_in_the_room_of_a_worker_that_has_stayed():
    fleet = plan_stuck(35, max_gpu_budget=3)
    assert fleet.done == [("remove", "prefill")] * 2  # after 10 s and 30


def test_a_worker_that_ends_slowly_keeps_only_those_from_starting_who_need_its_room():
    for budget, added in ((3, []), (4, [("add", "decode")])):
        fleet = plan_stuck(200, max_gpu_budget=budget, drain_s=500.0)
        assert sorted(fleet.done) == [*added, ("remove", "prefill")]
        fleet = plan_stuck(515, max_gpu_budget=budget, drain_s=500.0)
        assert fleet.counts == {"prefill": 1, "decode": 2}


def test_a_worker_that_cannot_be_removed_keeps_none_from_being_added_for_which_there_is_room():
    """Regression: nothing was added any more."""
    fleet = plan_stuck(100, max_gpu_budget=5)
    assert fleet.counts == {"prefill": 2, "decode": 3}
    assert fleet.done.count(("remove", "prefill")) < 5


def test_a_removal_that_fails_is_tried_again_after_a_while_that_grows():
    record = io.BytesIO()
    plan_stuck(3000, max_gpu_budget=3, record=record)
    lines = record.getvalue().splitlines()
    entries = [msgspec.json.decode(line, type=Recorded) for line in lines]
    made = [entry.decision for entry in entries if entry.decision is not None]
    at = [decision.at for decision in made if decision.changes]
    assert at == [10, 30, 70, 150, 310, 630, 1230, 1830, 2430]
    assert "to remove a prefill worker has failed 2 times and is retried in 30 s" in made[3].reason
    assert [entry.decision for entry in replay(None, lines)] == made


def test_models_share_the_budget():
    connector = Counting(a=1, b=1)
    connector.load.update(a=10.0, b=10.0)
    plan(connector, 300)
    assert sorted(connector.workers.values()) == [1, 2]


def test_a_start_that_fails_blocks_nothing():
    connector = Counting(a=1, b=1)
    connector.load.update(a=10.0, b=10.0)
    connector.fails.add("a")
    plan(connector, 300)
    assert connector.workers == {"a": 1, "b": 2}


def test_a_model_whose_workers_do_not_start_holds_up_no_other():
    """The other one had waited for the end of its start."""
    connector = Counting(a=1, b=1, start_s=5.0)
    connector.load.update(a=10.0, b=0.7)
    connector.fails.add("a")

    async def rush():
        await asyncio.sleep(12)
        connector.load["b"] = 1.7

    view = plan(connector, 18, dataclasses.replace(CONFIG, max_gpu_budget=4), meanwhile=rush)
    assert connector.workers == {"a": 1, "b": 2} and connector.changes == [(20.0, "b", 1)]
    assert view.changing and view.models["a"].pending == 1 and view.models["b"].pending == 0


def test_a_start_that_fails_is_tried_again_after_a_while_that_grows():
    connector, record = Counting(a=1), io.BytesIO()
    connector.load["a"] = 2.8
    connector.fails.add("a")

    async def mend():
        await asyncio.sleep(400)
        connector.fails.clear()

    plan(connector, 300, record=record, meanwhile=mend)
    entries = [msgspec.json.decode(line, type=Recorded) for line in record.getvalue().splitlines()]
    made = [entry.decision for entry in entries if entry.decision is not None]
    # A start takes 60 s, and the next one begins 10, 20, 40 and 80 s after its end. The last one goes well.
    assert [decision.at for decision in made if decision.changes] == [5, 75, 155, 255, 395, 460]
    assert [entry.decision for entry in replay(None, record.getvalue().splitlines())] == made
    assert connector.workers == {"a": 3}


def test_a_change_of_role_that_fails_gives_way_to_an_end_and_a_start():
    class Fixed(Apart):
        async def change_role(self, model, role, to):
            self.done.append((role, to))
            raise UnavailableError("the worker has not changed its role")

        async def remove(self, model, role):
            self.counts[role] -= 1
            return "m-1"

        async def add(self, model, role):
            self.counts[role] += 1
            return "m-2"

    fleet, config = Fixed(prefill=3, decode=1), PlannerConfig(max_gpu_budget=4, change_roles=True)

    async def run():
        planning = asyncio.create_task(PlannerLoop(config, fleet, LoopClock()).run())
        await asyncio.sleep(25)
        planning.cancel()

    run_virtual(run())
    assert fleet.done == [("prefill", "decode")] and fleet.counts == {"prefill": 2, "decode": 2}


def test_workers_that_start_side_by_side_and_fail_are_one_failure():
    class Failing(Apart):
        async def add(self, model, role):
            self.done.append(("add", role))
            raise UnavailableError("there is no GPU")

    fleet, record = Failing(prefill=1, decode=1), io.BytesIO()
    config = PlannerConfig(min_endpoint=3)

    async def run():
        planning = asyncio.create_task(PlannerLoop(config, fleet, LoopClock(), record).run())
        await asyncio.sleep(12)
        planning.cancel()

    run_virtual(run())
    last = msgspec.json.decode(record.getvalue().splitlines()[-1], type=Recorded).observation
    assert [(each.role, each.times) for each in last.failures] == [("decode", 1), ("prefill", 1)]


@pytest.mark.parametrize("start_s", [3.0, 20.0])
def test_changes_of_several_models_that_are_under_way_at_once_stay_within_the_budget(start_s):
    class Watched(Counting):
        async def observe(self):
            assert len(self.states) <= 4
            self.most = max(self.most, sum(self.pending(name) > 0 for name in self.load))
            return await super().observe()

    connector = Watched(start_s=start_s, a=1, b=1)
    connector.most = 0

    async def rush():
        connector.load["a"] = 10.0
        await asyncio.sleep(7)
        connector.load["b"] = 10.0

    plan(connector, 200, dataclasses.replace(CONFIG, max_gpu_budget=4), meanwhile=rush)
    assert sorted(connector.workers.values()) in ([1, 3], [2, 2])
    assert connector.most == (2 if start_s > 5 else 1)


def test_what_is_under_way_in_a_fleet_is_counted_for_its_own_model():
    components = [Component(name, (), name) for name in "ab"]

    class Slow(FakeConnector):
        async def remove(self, model, role):
            await asyncio.sleep(5)
            return await super().remove(model, role)

    connector = Slow(components, start_s=5.0)

    class Router:
        def observe(self, model, decode_role):
            return Observation(at=0, decode=[], decode_role=decode_role, draining=2, paused=1)

    async def run():
        fleet = OwnFleet(Router(), connector, components)
        adding = asyncio.create_task(fleet.add("a", "both"))
        await asyncio.sleep(1)
        pending = {name: seen.pending for name, seen in (await fleet.observe()).items()}
        assert pending == {"a": 1, "b": 0}
        await adding
        removing = asyncio.create_task(fleet.remove("a", "both"))
        await asyncio.sleep(1)
        aside = {name: (seen.draining, seen.paused) for name, seen in (await fleet.observe()).items()}
        assert aside == {"a": (1, 1), "b": (2, 1)}, "what is removed drains as well"
        await removing

    run_virtual(run())


def test_an_adviser_says_what_it_would_do_and_changes_nothing():
    connector = Counting(a=1)
    connector.load["a"] = 10.0
    view = plan(connector, 50, PlannerConfig(enabled=True, no_operation=True))
    assert connector.changes == [] and view.desired == {"both": 2} and "0.9" in view.last_decision


@pytest.mark.parametrize("load", [0.1, 2.8])
def test_a_record_replayed_gives_the_same_decisions(load):
    connector, record = Counting(a=2, b=1), io.BytesIO()
    connector.load.update(a=load, b=0.7)
    plan(connector, 101, record=record)
    lines = [msgspec.json.decode(line, type=Recorded) for line in record.getvalue().splitlines()]
    made = [line.decision for line in lines if line.decision is not None]
    assert len(made) == 40  # one for each of two models, every five seconds
    assert [line.decision for line in replay(CONFIG, record.getvalue().splitlines())] == made


@pytest.mark.parametrize("mode", ["load", "sla"])
def test_planners_of_one_record_are_replayed_each_with_its_own_settings(tmp_path, mode):
    """The second one had inherited what the first one had learnt, such as the grace of a new worker."""
    profile = tmp_path / "profile.json"
    write_profile(profile, profile_of("h200", "qwen3-8b", 256, 300_000, 8192))
    config = dataclasses.replace(CONFIG, mode=mode, ttft=10.0, profile=str(profile))
    record = io.BytesIO()
    connector = Counting(a=2, start_s=1.0)
    connector.load["a"] = 2.8
    plan(connector, 6, config, record)  # it adds a worker, and is killed
    connector = Counting(a=2)
    plan(connector, 11, dataclasses.replace(config, adjustment_interval=10.0), record)
    lines = record.getvalue().splitlines()
    entries = [msgspec.json.decode(line, type=Recorded) for line in lines]
    made = [entry.decision for entry in entries if entry.decision is not None]
    assert mode == "sla" or [decision.desired for decision in made] == [{"both": 3}, {"both": 1}]
    assert [entry.decision for entry in replay(None, lines)] == made


def test_the_command_prints_the_decisions_of_a_record(tmp_path, capsys):
    connector, record = Counting(a=1), io.BytesIO()
    connector.load["a"] = 0.8
    plan(connector, 6, PlannerConfig(adjustment_interval=5.0, decode_kv_scale_up_threshold=0.7), record)
    file, fleet = tmp_path / "record.jsonl", tmp_path / "fleet.toml"
    file.write_bytes(record.getvalue())
    assert main(["plan", "--replay", str(file)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=Recorded).decision.desired == {"both": 2}
    fleet.write_text("[[workers]]\n[planner]\ndecode_kv_scale_up_threshold = 0.99\n")
    assert main(["plan", "--replay", str(file), "--fleet", str(fleet)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=Recorded).decision.changes == []


# What Prometheus reads of it


def samples(view):
    return {
        (sample.name.removeprefix("shoal:planner_"), *list(sample.labels.values())[1:]): sample.value
        for family in planner_metrics(view)
        for sample in family.samples
    }


def test_metrics_tell_workers_as_they_are_and_as_decided_and_decisions_by_kind():
    connector = Counting(a=1, start_s=20.0)
    connector.load["a"] = 2.8
    found = samples(plan(connector, 12))
    assert (found["workers", "both"], found["desired_workers", "both"]) == (1, 2)
    assert found["pending_workers",] == 1 and found["max_gpus",] == 3
    assert found["decisions_total", "add"] == 1 and found["decisions_total", "held"] == 1
    connector = Counting(a=1, start_s=20.0)
    connector.load["a"] = 2.8
    found = samples(plan(connector, 200))
    assert (found["workers", "both"], found["desired_workers", "both"]) == (3, 3)
    assert (found["changes_total", "add"], found["changes_total", "remove"]) == (2, 0)
    assert found["failures_total", "add"] == 0 and found["decisions_total", "none"] > 5


def test_metrics_count_workers_that_did_not_start():
    connector = Counting(a=1)
    connector.load["a"] = 10.0
    connector.fails.add("a")
    found = samples(plan(connector, 200))
    assert found["failures_total", "add"] >= 2 and found["changes_total", "add"] == 0
    assert found["workers", "both"] == 1 and found["desired_workers", "both"] == 2


def test_a_record_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["plan", "--replay", str(tmp_path / "none.jsonl")]) != 0
    assert "none.jsonl" in capsys.readouterr().err
