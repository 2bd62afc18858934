"""A planner that reaches its fleet over a registry, with a connector and a router that only count."""

import asyncio
import contextlib
import subprocess
from types import SimpleNamespace

import pytest

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors.connector import Component
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.registry.open import open_registry
from shoal.fleet.registry.registry import Member
from shoal.fleet.scaling import scaled_fleet
from shoal.fleet.scaling.loop import PlannerLoop
from shoal.fleet.scaling.scaled_fleet import OwnFleet, PlannerPort, RemoteFleet, become_planner, find_fleet
from shoal.fleet_views import PlannerView, WorkerState
from tests import nats_server
from tests.fake_connector import FakeConnector
from tests.serving import free_port
from tests.waiting import until

VIEW = PlannerView("load", "because", {"both": 2}, True)


class Router:
    """The part of a Fleet that a planner uses."""

    def __init__(self, connector):
        self.connector, self.load, self.planner_view = connector, 0.0, None
        self.roles = {"m-1": "both"}

    def least_loaded(self, model, role):
        return next((name for name, found in self.roles.items() if found == role), None)

    async def change_role(self, worker_id, role):
        asyncio.get_running_loop().call_later(0.05, self.roles.__setitem__, worker_id, role)

    def role_of(self, worker_id):
        return self.roles[worker_id]

    def observe(self, model, decode_role):
        count = self.connector.count(model)
        loads = [DecodeLoad(min(1.0, self.load / max(1, count)))] * count
        return Observation(at=0.0, decode=loads, decode_role=decode_role)


@contextlib.asynccontextmanager
async def fleet(start_s=0.05, name="fleet"):
    """A fleet of one worker on a registry of its own: (router, connector, how to open the registry)."""
    url, registries = f"tcp://127.0.0.1:{free_port()}", []

    def join(may_host=False):
        registries.append(open_registry(url, lease_s=1.0, may_host=may_host))
        return registries[-1]

    components = [Component("m", (), model="m", count=1)]
    connector = FakeConnector(components, start_s=start_s)
    connector.states["m-1"] = WorkerState.READY
    router = Router(connector)
    port = PlannerPort(OwnFleet(router, connector, components), join(may_host=True), name)
    serving = asyncio.create_task(port.run())
    try:
        yield SimpleNamespace(router=router, connector=connector, join=join)
    finally:
        for registry in reversed(registries[1:]):
            await registry.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await registries[0].close()


def run(test):
    async def bounded():
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def planner(world, show=lambda: VIEW):
    """Returns a registry that has become the planner, and its RemoteFleet."""
    registry = world.join()
    name = await find_fleet(registry, "fleet")
    await become_planner(registry, name)
    found = RemoteFleet(registry, name)
    found.show(show)
    return registry, found


def test_a_planner_observes_the_fleet_and_is_shown_until_it_leaves():
    async def test():
        async with fleet() as world:
            registry, remote = await planner(world)
            world.router.load = 0.25
            assert (await remote.observe())["m"].decode == [DecodeLoad(0.25)]
            assert world.router.planner_view() == VIEW
            await registry.close()
            await until(lambda: world.router.planner_view is None)

    run(test)


def test_a_fleet_follows_its_load_by_it():
    async def test():
        async with fleet() as world:
            _, remote = await planner(world)
            config = PlannerConfig(metric_pulling_interval=0.02, adjustment_interval=0.1, max_gpu_budget=2)
            loop = PlannerLoop(config, remote, LoopClock())
            planning = asyncio.create_task(loop.run())
            world.router.load = 1.9
            await until(lambda: world.connector.count("m") == 2)
            await until(lambda: world.router.planner_view().desired == {"both": 2})
            world.router.load = 0.1
            await until(lambda: world.connector.count("m") == 1)
            planning.cancel()
            assert [count for _, _, count in world.connector.changes] == [1, -1]

    run(test)


def test_a_change_continues_without_its_planner_and_is_pending_for_the_next():
    async def test():
        async with fleet(start_s=0.5) as world:
            registry, remote = await planner(world)
            adding = asyncio.create_task(remote.add("m", "both"))
            await until(lambda: "m-2" in world.connector.states)
            adding.cancel()
            await registry.close()
            registry, remote = await planner(world)
            assert (await remote.observe())["m"].pending == 1
            await until(lambda: world.connector.count("m") == 2)
            assert (await remote.observe())["m"].pending == 0

    run(test)


def test_a_change_that_fails_without_its_planner_is_in_the_fleets_log(caplog):
    async def test():
        async with fleet() as world:
            registry, remote = await planner(world)
            world.connector.fails.add("m")
            world.connector.start_timeout_s = 0.5
            adding = asyncio.create_task(remote.add("m", "both"))
            await until(lambda: "m-2" in world.connector.states)
            adding.cancel()
            await registry.close()
            await until(lambda: "m-2 was not ready within 0.5 s" in caplog.text)

    run(test)


def test_an_error_of_a_change_reaches_the_planner():
    async def test():
        async with fleet() as world:
            _, remote = await planner(world)
            with pytest.raises(ConfigError, match="role 'prefill'"):
                await remote.add("m", "prefill")
            assert await remote.remove("m", "both") == "m-1"
            with pytest.raises(UnavailableError, match="no both worker of m"):
                await remote.remove("m", "both")

    run(test)


def test_a_worker_has_its_new_role_when_the_change_is_reported():
    async def test():
        async with fleet() as world:
            _, remote = await planner(world)
            assert await remote.change_role("m", "both", "prefill") == "m-1"
            assert world.router.roles == {"m-1": "prefill"}
            with pytest.raises(UnavailableError, match="m has no worker of the role 'both'"):
                await remote.change_role("m", "both", "prefill")

    run(test)


def test_a_worker_that_does_not_answer_to_its_new_role_is_not_awaited_for_ever(monkeypatch):
    """Regression: when the plane of the worker was away, the planner decided nothing any more."""

    async def test():
        async with fleet() as world:
            _, remote = await planner(world)
            monkeypatch.setattr(scaled_fleet, "ROLE_S", 0.1)
            monkeypatch.setattr(world.router, "change_role", lambda worker_id, role: asyncio.sleep(600))
            with pytest.raises(UnavailableError, match=r"m-1 has not changed its role in 0\.1 s"):
                await remote.change_role("m", "both", "prefill")
            assert (await remote.observe())["m"].pending == 0

    run(test)


def test_an_observation_that_fails_does_not_end_the_planner():
    """An observation may fail with any error; the planner continues."""

    async def test():
        async with fleet() as world:
            registry, remote = await planner(world)
            observe, lost = world.router.observe, []

            def lose(model, role):
                lost.append(model)
                raise ShoalError("lost")

            world.router.observe = lose
            with pytest.raises(UnavailableError, match="does not report its workers: lost"):
                await remote.observe()
            config = PlannerConfig(metric_pulling_interval=0.02, adjustment_interval=0.1, max_gpu_budget=2)
            planning = asyncio.create_task(PlannerLoop(config, remote, LoopClock()).run())
            await until(lambda: len(lost) > 2)
            world.router.observe, world.router.load = observe, 1.9
            await until(lambda: world.connector.count("m") == 2)
            planning.cancel()
            await registry.close()

    run(test)


def test_a_second_planner_is_refused_and_one_that_has_left_makes_room():
    async def test():
        async with fleet() as world:
            registry, _ = await planner(world)
            with pytest.raises(ConfigError, match="another process is the planner of the fleet fleet"):
                await planner(world)
            await registry.close()
            await planner(world)

    run(test)


def test_a_second_fleet_of_the_same_name_answers_no_planner(tmp_path):
    """Regression: on NATS, both fleets carried out each change until the second one's name was refused."""

    async def test():
        url = f"nats://127.0.0.1:{free_port()}"
        options = ["-a", "127.0.0.1", "-p", url.rpartition(":")[2], "-js", "-sd", str(tmp_path)]
        server = subprocess.Popen([nats_server.find(), *options], stderr=subprocess.DEVNULL)
        registries = [open_registry(url, lease_s=1.0) for _ in range(3)]
        components = [Component("m", (), model="m", count=1)]
        connectors = [FakeConnector(components) for _ in range(2)]
        first, second = (
            PlannerPort(OwnFleet(Router(connector), connector, components), registry, "fleet")
            for connector, registry in zip(connectors, registries)
        )
        serving = asyncio.create_task(first.run())
        try:
            remote = RemoteFleet(registries[2], await find_fleet(registries[2], "fleet"))
            refused, num_added = asyncio.create_task(second.run()), 0
            while not refused.done():
                await remote.add("m", "both")
                num_added += 1
            with pytest.raises(ConfigError, match="got 'fleet', which another process has"):
                await refused
            assert num_added and [len(each.states) for each in connectors] == [num_added, 0]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await asyncio.gather(*(registry.close() for registry in registries))
            server.kill()
            server.wait()

    run(test)


def test_a_planner_waits_for_a_fleet_and_does_not_guess_among_several():
    async def test():
        async with fleet(name="here-fleet") as world:
            registry = world.join()
            assert await find_fleet(registry, "elsewhere-fleet") == "here-fleet"  # the only one
            await registry.register(Member(id="there-fleet", role="supervisor", address=""))
            await until(lambda: "there-fleet" in registry.members)
            assert await find_fleet(registry, "here-fleet") == "here-fleet"
            with pytest.raises(ConfigError, match="here-fleet, there-fleet"):
                await find_fleet(registry, "elsewhere-fleet")

    run(test)


def test_a_planner_continues_when_its_fleet_is_back():
    class Away:
        is_away = True

        def show(self, view):
            pass

        async def observe(self):
            if self.is_away:
                raise UnavailableError("the fleet does not answer")
            return {"m": Observation(at=0.0, decode=[DecodeLoad(0.95)])}

        async def add(self, model, role):
            self.added = (model, role)
            return "m-2"

    async def test():
        away = Away()
        config = PlannerConfig(metric_pulling_interval=0.02, adjustment_interval=0.1)
        planning = asyncio.create_task(PlannerLoop(config, away, LoopClock()).run())
        await asyncio.sleep(0.2)
        away.is_away = False
        await until(lambda: hasattr(away, "added"))
        planning.cancel()

    run(test)
