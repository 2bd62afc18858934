"""`shoal plan` beside `shoal fleet up`: real workers with a tiny model on the CPU, in processes of their own."""

import contextlib
import json
import re
import subprocess

import pytest

from tests.fleet_up import PATIENCE_S, Crowd, Fleet, sized
from tests.serving import PYTHON, ROOT
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)


@contextlib.contextmanager
def planner(fleet, name, *options):
    """`shoal plan`, with its lines in the file of this name."""
    process = fleet.start("plan", *options, log=fleet.folder / name)
    process.log = fleet.folder / name
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def plans(fleet, process):
    """Returns True if it is seen in /fleet."""
    assert process.poll() is None, process.log.read_text()
    return "planner" in fleet.json("/fleet")


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["process", "circus"])
def test_a_planner_beside_its_fleet_may_die_and_the_next_one_goes_on(tmp_path, folder, connector):
    record = tmp_path / "planner.jsonl"
    with Fleet(tmp_path, sized(folder, record, connector, enabled=False)) as fleet:
        fleet.ready(1)
        assert "planner" not in fleet.json("/fleet")
        with planner(fleet, "adviser.log", "--no-operation"), Crowd(fleet):
            fleet.until(lambda: fleet.json("/fleet").get("planner", {}).get("desired") == {"both": 2})
            assert list(fleet.workers()) == ["tiny-1"]
        fleet.until(lambda: "planner" not in fleet.json("/fleet"))
        with planner(fleet, "first.log") as first, Crowd(fleet):
            eventually(lambda: plans(fleet, first))
            second = fleet.start("plan", log=tmp_path / "second.log")
            assert second.wait(PATIENCE_S) == 1
            assert "another process is the planner" in (tmp_path / "second.log").read_text()
            fleet.until(lambda: "tiny-2 starts" in fleet.text() or "tiny-2" in fleet.workers())
            first.kill()  # while the worker that it has added starts
            first.wait()
            fleet.until(lambda: "planner" not in fleet.json("/fleet"))
            with planner(fleet, "third.log") as third:
                eventually(lambda: plans(fleet, third))
                fleet.ready(2)
                assert sorted(fleet.workers()) == ["tiny-1", "tiny-2"]
        with planner(fleet, "fourth.log"):
            fleet.until(lambda: list(fleet.workers()) == ["tiny-1"])
            assert fleet.ask("And then", 4, model="tiny")
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()
    if connector == "process":
        assert len(re.findall(r"tiny-2 starts as process", fleet.text())) == 1
    for name in ("adviser", "first", "second", "third", "fourth"):
        assert "Traceback" not in (tmp_path / f"{name}.log").read_text()
    entries = [json.loads(line) for line in record.open()]
    planners = [number for number, entry in enumerate(entries) if "config" in entry]
    assert len(planners) == 4  # the second one was refused
    decided = [entry["decision"] for entry in entries[planners[1] :] if "decision" in entry]
    assert [change["count"] for decision in decided for change in decision["changes"]] == [1, -1]
    command = [PYTHON, "-m", "shoal", "plan", "--replay", record]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line) for line in again] == [entry for entry in entries if "decision" in entry]


@pytest.mark.slow
def test_a_prefill_worker_becomes_a_decode_worker_under_load_and_goes_first_without_it(tmp_path, folder):
    options = """{ dtype = "float32", device = "cpu", max_model_len = 512, num_gpu_blocks_override = 140,
        kv_transfer_config = { kv_role = "kv_both" } }""".replace("\n", " ")
    text = f"""
        model = "{folder}"
        [[workers]]
        name = "tiny"
        role = "prefill"
        count = 2
        options = {options}
        [[workers]]
        name = "tiny"
        role = "decode"
        options = {options}
        [router]
        max_local_prefill_length = 10_000
        [planner]
        change_roles = true
        metric_pulling_interval = 0.2
        adjustment_interval = 2.0
        decode_kv_scale_up_threshold = 0.02
        decode_kv_scale_down_threshold = 0.01
        max_gpu_budget = 3
    """

    def roles():
        return sorted(worker["role"] for worker in fleet.workers().values())

    with Fleet(tmp_path, text) as fleet:
        fleet.ready(3)
        pids = {name: worker["pid"] for name, worker in fleet.workers().items()}
        with Crowd(fleet):
            # The first interval begins with load, so that no prefill worker is merely removed.
            fleet.until(lambda: max(worker["active_requests"] for worker in fleet.workers().values()) >= 6)
            plan = planner(fleet, "plan.log")
            process = plan.__enter__()
            fleet.until(lambda: roles() == ["decode", "decode", "prefill"])
            assert {name: worker["pid"] for name, worker in fleet.workers().items()} == pids
            [moved] = [
                name
                for name, worker in fleet.workers().items()
                if "prefill" in name and worker["role"] == "decode"
            ]
        fleet.until(lambda: roles() == ["decode", "prefill"])
        assert moved not in fleet.workers(), "the one that was started for another role"
        plan.__exit__(None, None, None)
        assert "1 prefill become decode" in process.log.read_text()
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()


@pytest.mark.slow
@pytest.mark.parametrize("is_beside", [False, True])
def test_two_models_on_one_budget_get_the_workers_that_their_load_needs(tmp_path, folder, is_beside):
    """There are three GPUs: the model with the load has two of them, and the other model gives one back first."""
    tables = "".join(
        f"""
        [[workers]]
        model = "{folder}"
        name = "{name}"
        options = {{ dtype = "float32", device = "cpu", max_model_len = 512, num_gpu_blocks_override = 140 }}"""
        for name in ("left", "right")
    )
    text = f"""{tables}
        [planner]
        enabled = {str(not is_beside).lower()}
        metric_pulling_interval = 0.2
        adjustment_interval = 2.0
        decode_kv_scale_up_threshold = 0.3
        decode_kv_scale_down_threshold = 0.01
        max_gpu_budget = 3
        record = "{tmp_path / "planner.jsonl"}"
    """

    def names():
        """The names of the workers that are ready."""
        return sorted(name for name, worker in fleet.workers().items() if worker["state"] == "ready")

    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(tmp_path, text))
        if is_beside:
            stack.enter_context(planner(fleet, "plan.log"))
        fleet.until(lambda: names() == ["left-1", "right-1"])
        with Crowd(fleet, model="left"):
            fleet.until(lambda: names() == ["left-1", "left-2", "right-1"])
        with Crowd(fleet, model="right"):
            fleet.until(lambda: names() == ["left-1", "right-1", "right-2"])
        fleet.until(lambda: names() == ["left-1", "right-1"])
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()
    entries = [json.loads(line) for line in (tmp_path / "planner.jsonl").open()]
    sizes = {}
    for entry in entries:
        if "decision" in entry:
            sizes[entry["model"]] = entry["decision"]["desired"]["both"]
            assert sum(sizes.values()) <= 3
    made = [
        (entry["model"], change["count"])
        for entry in entries
        for change in entry.get("decision", {}).get("changes", [])
    ]
    assert made == [("left", 1), ("left", -1), ("right", 1), ("right", -1)]


def test_a_fleet_that_plans_itself_needs_no_planner_beside_it(tmp_path, folder):
    file = tmp_path / "fleet.toml"
    file.write_text(sized(folder, tmp_path / "planner.jsonl", "process"))
    fleet = Fleet.__new__(Fleet)
    fleet.folder, fleet.file = tmp_path, file
    with planner(fleet, "plan.log") as process:
        assert process.wait(PATIENCE_S) == 1
        assert "[planner] enabled must be left out for `shoal plan`" in process.log.read_text()
