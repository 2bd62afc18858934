"""The planner at work on virtual time, with a connector that only counts."""

import asyncio
import io

import msgspec
import pytest

from shoal.cli.main import main
from shoal.errors import UnavailableError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.planner import DecodeLoad, Observation, PlannerConfig, Recorded, replay
from shoal.fleet.planner_loop import PlannerLoop

CONFIG = PlannerConfig(
    enabled=True, metric_pulling_interval=1.0, adjustment_interval=5.0, max_gpu_budget=3, start_timeout=60.0
)


class Counting:
    """Models with their workers of one role. `load` is the KV load of all workers of a model together."""

    def __init__(self, start_s=20.0, **workers):
        self.workers, self.load, self.start_s = dict(workers), dict.fromkeys(workers, 0.0), start_s
        self.starting = dict.fromkeys(workers, 0)
        self.changes, self.fails = [], set()

    def observe(self):
        return {
            name: Observation(at=0, decode=[DecodeLoad(min(1.0, self.load[name] / count))] * count)
            for name, count in self.workers.items()
        }

    def pending(self, model):
        return self.starting[model]

    async def add(self, model, role):
        self.starting[model] += 1
        try:
            await asyncio.sleep(self.start_s)
        finally:
            self.starting[model] -= 1
        if model in self.fails:
            raise UnavailableError(f"no worker of {model} starts")
        self.workers[model] += 1
        self.changes.append((asyncio.get_running_loop().time(), model, 1))
        return f"{model}-{self.workers[model]}"

    async def remove(self, model, role):
        self.workers[model] -= 1
        self.changes.append((asyncio.get_running_loop().time(), model, -1))
        return f"{model}-{self.workers[model] + 1}"


def plan(connector, seconds, config=CONFIG, record=None, meanwhile=None):
    async def run():
        loop = PlannerLoop(config, connector.observe, connector, LoopClock(), record)
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


def test_one_change_at_a_time_and_none_while_it_is_under_way():
    connector = Counting(a=1, start_s=20.0)
    connector.load["a"] = 10.0
    plan(connector, 100)
    times = [time for time, _, _ in connector.changes]
    assert len(times) == 2 and times[1] - times[0] >= 20.0


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


def test_the_command_prints_the_decisions_of_a_record(tmp_path, capsys):
    connector, record = Counting(a=1), io.BytesIO()
    connector.load["a"] = 0.95
    plan(connector, 6, PlannerConfig(adjustment_interval=5.0), record)
    file, fleet = tmp_path / "record.jsonl", tmp_path / "fleet.toml"
    file.write_bytes(record.getvalue())
    assert main(["plan", "--replay", str(file)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=Recorded).decision.desired == {"both": 2}
    fleet.write_text("[[workers]]\n[planner]\ndecode_kv_scale_up_threshold = 0.99\n")
    assert main(["plan", "--replay", str(file), "--fleet", str(fleet)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=Recorded).decision.changes == []


def test_a_record_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["plan", "--replay", str(tmp_path / "none.jsonl")]) != 0
    assert "none.jsonl" in capsys.readouterr().err
