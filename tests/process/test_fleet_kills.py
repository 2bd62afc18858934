"""A fleet that a planner sizes, and what is left of it when a part is killed at an awkward moment: afterwards
each worker is there once, and the file of state says so."""

import concurrent.futures
import contextlib
import http.client
import os
import signal

import psutil
import pytest

from shoal.fleet.connectors.state_file import StateFile
from tests.fleet_up import PATIENCE_S, Crowd, Fleet, sized, state_home
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def servers_of(folder):
    """The processes of `shoal serve` whose fleet has its state in this folder."""
    lines = {process.pid: process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])}
    plane = f"{state_home(folder)}/shoal/"
    return {pid for pid, line in lines.items() if "serve" in line and any(plane in word for word in line)}


def state_of(folder):
    """{worker: its process}, as the fleet's file of state has them."""
    [file] = folder.glob("shoal/*/state.json")
    components = StateFile(file.parent).read().components
    return {
        f"{name}-{number}": worker.process and worker.process.pid
        for name, entry in components.items()
        for number, worker in entry.workers.items()
    }


def workers_with_processes(fleet):
    return {name: worker["pid"] for name, worker in fleet.workers().items()}


@pytest.mark.parametrize("connector", ["process", "circus"])
def test_a_fleet_that_is_killed_while_a_worker_starts_has_each_worker_once_afterwards(
    tmp_path, folder, connector
):
    text = sized(folder, tmp_path / "planner.jsonl", connector)
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        with contextlib.suppress(OSError, http.client.HTTPException), Crowd(fleet):
            fleet.until(lambda: fleet.json("/fleet").get("planner", {}).get("changing"))
            assert set(fleet.workers()) == {"tiny-1"}, "the second one is not there yet"
            fleet.process.kill()
            fleet.process.wait()
        with Fleet(tmp_path, text) as again:
            again.ready(1)
            again.until(lambda: workers_with_processes(again) == state_of(tmp_path))
            assert servers_of(tmp_path) == set(state_of(tmp_path).values()), "one lives beside the state"
            assert again.ask("And then", 4, model="tiny")
            again.until(lambda: set(again.workers()) == {"tiny-1"})  # nobody asks any more
            again.signal()
            assert again.process.wait(PATIENCE_S) == 0 and "Traceback" not in again.text()
        eventually(lambda: not servers_of(tmp_path))


@pytest.mark.parametrize("connector", ["process", "circus"])
def test_a_state_that_was_lost_or_damaged_while_the_fleet_was_down_is_written_anew(
    tmp_path, folder, connector
):
    text = sized(folder, tmp_path / "planner.jsonl", connector)
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        fleet.process.kill()
        fleet.process.wait()
        [file] = tmp_path.glob("shoal/*/state.json")
        file.write_text("{half a st")
        with Fleet(tmp_path, text) as again:
            again.ready(1)
            again.until(lambda: workers_with_processes(again) == state_of(tmp_path))
            assert "state.json cannot be read" in again.text()
            assert servers_of(tmp_path) == set(state_of(tmp_path).values()), "one lives beside the state"
            again.signal()
            assert again.process.wait(PATIENCE_S) == 0 and "Traceback" not in again.text()


def test_workers_under_circus_come_back_after_its_arbiter_was_killed_under_load(tmp_path, folder):
    """Workers die with it, so their requests fail, but no others; the state file has the living workers."""
    with Fleet(tmp_path, sized(folder, tmp_path / "planner.jsonl", "circus")) as fleet:
        before = fleet.ready(1).workers()["tiny-1"]["pid"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
            running = [pool.submit(fleet.request, "/v1/completions", body) for _ in range(60)]
            fleet.until(lambda: fleet.workers()["tiny-1"]["active_requests"])
            [arbiter] = tmp_path.glob("shoal/*/circus.pid")
            os.kill(int(arbiter.read_text()), signal.SIGKILL)
            # each ends once, in any case
            assert {asked.result()[0] for asked in running} <= {200, 500, 502, 503}
        fleet.until(lambda: fleet.workers().get("tiny-1", {}).get("pid") not in (None, before))
        fleet.ready(1)
        fleet.until(lambda: workers_with_processes(fleet) == state_of(tmp_path))
        assert fleet.ask("And then", 4, model="tiny") and servers_of(tmp_path) == set(
            state_of(tmp_path).values()
        )
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0
