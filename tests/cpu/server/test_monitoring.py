"""GET /fleet of a server without a router: itself as its worker, what came lately, and a short past."""

import asyncio
import copy
import functools
import itertools
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from shoal.fleet_views import FleetView, QueueView, WorkerView
from shoal.server.served import monitoring
from shoal.server.served.catalog import Catalog
from shoal.server.served.external_model import ExternalModel
from shoal.stats import KvLoans, KvTierStats, KvTransferStats, SleepState, Stats
from shoal.telemetry.served import ServedTotals
from tests.fake_server import FakeServer, engine_saying
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server():
    with FakeServer(engine_saying("hello ", cached_tokens=1), api_key=["sesame"]) as server:
        yield server


KEY = {"Authorization": "Bearer sesame"}


def look(server, query=""):
    status, found = server.json("/fleet" + query, headers=KEY)
    assert status == 200, found
    return found


def sample(server):
    asyncio.run_coroutine_threadsafe(server.app.context.monitor.sample(), server.loop).result(60)


def ask(server, **more):
    body = {"prompt": "abc", "max_tokens": 20, "stream": True, **more}
    assert server.request("/v1/completions", body, headers=KEY)[0] == 200


def test_a_server_is_its_own_worker(server):
    ask(server)
    sample(server)
    ask(server)
    sample(server)
    found = look(server)
    [worker], [model] = found["workers"], found["models"]
    assert (worker["id"], worker["model"], worker["state"], worker["role"]) == (
        "tiny",
        "tiny",
        "ready",
        "both",
    )
    device = worker["kv"]["device"]
    assert (device["usage"], device["used_blocks"], device["total_blocks"]) == (0.0, 0, 1024)
    assert model["name"] == "tiny" and not model["is_foreign"] and found["policy"] == ""
    for recent in (worker["recent"], model["recent"], found["recent"]):
        assert recent["output_tokens_s"] > 0 and 0 < recent["hit_rate"] < 1
        assert 0 < recent["ttft"]["p50"] <= recent["ttft"]["p99"] and recent["itl"]["p50"] > 0
    assert found["version"] and "history" not in found


def test_the_past_is_given_from_a_moment_on(server):
    sample(server)
    points = look(server, "?since=0")["history"]
    assert len(points) >= 2 and [p["at"] for p in points] == sorted(p["at"] for p in points)
    last = points[-1]["at"]
    later = []
    while not later:  # the clock of points may stand still between two samples
        sample(server)
        later = look(server, f"?since={last}").get("history", [])
    assert all(point["at"] > last for point in later)
    assert look(server, "?since=0&worker=tiny")["history"]
    assert "history" not in look(server, "?since=0&worker=other")


def test_the_past_is_bounded():
    with FakeServer() as server:

        async def many():
            for _ in range(monitoring.POINTS + 20):
                await server.app.context.monitor.sample()

        asyncio.run_coroutine_threadsafe(many(), server.loop).result(60)
        found = server.json("/fleet?since=0")[1]["history"]
        assert len(found) == monitoring.POINTS


def test_the_view_needs_the_key_as_the_api_does(server):
    assert server.request("/fleet")[0] == 401


@pytest.mark.parametrize("query", ["?since=x", "?since=nan", "?since=inf", "?until=1"])
def test_a_wrong_parameter_is_reported(server, query):
    status, found = server.json("/fleet" + query, headers=KEY)
    assert status == 400 and "since" in found["error"]["message"]


@dataclass
class FakeFleet:
    """The part of a fleet that a Monitor uses."""

    counts: dict[str, ServedTotals]

    def view(self):
        workers = [WorkerView(id=n, url="", role="both", model="m", state="ready") for n in self.counts]
        return FleetView("kv", workers, QueueView(), QueueView())

    def served(self):
        return {name: copy.deepcopy(served) for name, served in self.counts.items()}


async def rates_of(fleet, changes, monkeypatch, interval=2.0):
    """Returns the recent rates of `fleet`, whose external workers all serve "m", in all and of the model:
    after each of these changes and one more interval."""
    now = itertools.count(0.0, interval)
    monkeypatch.setattr(monitoring, "time", SimpleNamespace(monotonic=lambda: next(now), time=time.time))
    looked = monitoring.Monitor(Catalog([], [ExternalModel(["m"], None)]), fleet)
    await looked.sample()
    found = []
    for change in changes:
        change()
        await looked.sample()
        view = await looked.view()
        found.append((view.recent.output_tokens_s, view.models[0].recent.output_tokens_s))
    return found


def test_an_external_worker_that_leaves_is_no_burst_of_tokens(monkeypatch):
    """Regression: the sums of the remaining workers were lower than before, as if all had started again."""
    fleet = FakeFleet({"a": ServedTotals(output_tokens=10_000), "b": ServedTotals(output_tokens=50)})
    serves = functools.partial(setattr, fleet.counts["b"], "output_tokens", 70)
    leaves = functools.partial(fleet.counts.pop, "a")
    assert asyncio.run(rates_of(fleet, [serves, leaves], monkeypatch)) == [(10.0, 10.0), (5.0, 5.0)]


def test_recent_rates_are_over_five_intervals_though_each_is_a_little_late(monkeypatch):
    """Regression: the rate was over four intervals, as five late ones are more than ten seconds."""
    fleet = FakeFleet({"a": ServedTotals()})
    serves = functools.partial(setattr, fleet.counts["a"], "output_tokens", 100)
    found = asyncio.run(rates_of(fleet, [serves] + [int] * 6, monkeypatch, interval=2.01))
    assert [rate > 0 for rate, _ in found] == [True] * 5 + [False] * 2


def test_an_engine_is_asked_for_all_at_once():
    """Regression: a busy engine answers late, and each further question was as late again."""
    with FakeServer() as server:
        asked = asyncio.Event()

        async def stats():
            await asked.wait()
            return Stats(num_running=7)

        async def sleep_state():
            asked.set()
            return SleepState()

        server.engine.stats, server.engine.sleep_state = stats, sleep_state
        assert server.json("/fleet")[1]["workers"][0]["running"] == 7


def test_a_task_that_is_cancelled_as_an_engine_answers_ends():
    """asyncio.wait_for of Python 3.11 forgets that: a report went on for ever, and the server with it."""
    with FakeServer() as server:

        async def cancelled():
            answers = asyncio.Event()
            server.engine.stats = lambda: asyncio.create_task(stats(answers))
            report = asyncio.create_task(reports())
            await asyncio.sleep(0.01)
            answers.set()
            await asyncio.sleep(0)
            report.cancel()
            await asyncio.wait([report], timeout=1)
            return report.cancelled()

        async def stats(answers):
            await answers.wait()
            return Stats()

        async def reports():
            await server.model.stats()
            await asyncio.sleep(60)

        assert asyncio.run_coroutine_threadsafe(cancelled(), server.loop).result()


def test_a_failed_request_is_counted():
    with FakeServer(engine_saying("a", error_after=2)) as server:
        sample(server)
        server.request("/v1/completions", {"prompt": "abc", "max_tokens": 8})
        sample(server)
        found = server.json("/fleet?since=0")[1]
        assert found["workers"][0]["failed"] == found["models"][0]["failed"] == 1
        assert found["history"][-1]["failed"] == 1


def test_a_dead_engine_is_shown_as_broken_and_the_monitor_goes_on():
    with FakeServer() as server:
        server.call(server.engine.kill)
        sample(server)
        [worker] = server.json("/fleet")[1]["workers"]
        assert worker["state"] == "broken" and "died" in worker["why"]


def test_a_monitor_that_fails_is_logged_and_requests_go_on(monkeypatch, caplog):
    async def broken(self):
        raise KeyError("a mistake")

    monkeypatch.setattr(monitoring.Monitor, "sample", broken)
    with FakeServer() as server:
        eventually(lambda: any("a bug in monitoring" in one.getMessage() for one in caplog.records))
        assert server.request("/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200


def test_what_an_engine_says_of_its_blocks_is_in_the_view():
    view = WorkerView(id="w", url="", role="both", model="m", state="ready")
    view.apply(
        Stats(
            num_running=2,
            num_waiting=1,
            num_blocks=100,
            num_free_blocks=75,
            num_preemptions=3,
            kv_tiers={
                "host": KvTierStats(1000, 100, 500, 50, 70, 700, 20, 200, 1),
                "store": KvTierStats(0, 0, 30, 3, 3),
            },
            kv_transfers={"shm": KvTransferStats(4, 4 * 10**9, 2.0), "nixl": KvTransferStats(6, 10**9, 0.5)},
            kv_loans=KvLoans(blocks_out=5, bytes_out=50),
            kv_transfer_failures={"timeout": 2},
        )
    )
    assert (view.running, view.waiting, view.preemptions) == (2, 1, 3)
    assert {name: tier.usage for name, tier in view.kv.items()} == {
        "device": 0.25,
        "host": 0.5,
        "store": None,
    }
    host = view.kv["host"]
    assert (host.used_blocks, host.total_blocks, host.stored_blocks) == (50, 100, 70)
    assert (host.fetched_blocks, host.failed_blocks) == (20, 1)
    assert (view.blocks_in, view.bytes_in, view.transfer_GB_s) == (10, 5 * 10**9, 2.0)
    assert (view.blocks_out, view.bytes_out, view.transfer_failures) == (5, 50, {"timeout": 2})
