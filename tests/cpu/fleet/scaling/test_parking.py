"""Workers that are parked asleep, where a connector and a router only count."""

import asyncio
from types import SimpleNamespace

import pytest

from shoal.control import Sleep, WakeUp
from shoal.errors import UnavailableError
from shoal.fleet.connectors.connector import Component
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.pool.commands import CommandResults
from shoal.fleet.scaling import parking as parking_module
from shoal.fleet.scaling.parking import Parking

COMPONENTS = [
    Component("m", (), model="m", role="both"),
    Component("m-prefill", (), model="m", role="prefill"),
]


class Host:
    """The connector of a host and its router."""

    def __init__(self, *names):
        self.names = list(names)
        self.workers = {
            name: SimpleNamespace(
                id=name, is_reached=True, is_asleep=False, info=SimpleNamespace(is_external=False)
            )
            for name in names
        }
        self.ended, self.commands = [], []
        self.noted = {}  # as the state has it

    def placed(self, model, role):
        return [name for name in self.names if ("prefill" in name) == (role == "prefill")]

    def roles(self):
        return ["prefill" if "prefill" in name else "both" for name in self.names]

    async def start(self):
        pass

    def parked(self):
        return [(name, "m", "both") for name, is_parked in self.noted.items() if is_parked]

    def record_parked(self, worker_id, is_parked):
        self.noted[worker_id] = is_parked

    async def place(self, model, role):
        await asyncio.sleep(0)
        self.names.append(f"new-{role}")
        return self.names[-1]

    async def begin(self, name):
        await asyncio.sleep(0.01)
        return name

    async def end(self, worker_id):
        await asyncio.sleep(0)
        self.names.remove(worker_id)
        self.workers.pop(worker_id, None)
        self.ended.append(worker_id)

    async def command(self, command, worker_ids, *, model, rolling):
        [worker_id] = worker_ids
        await asyncio.sleep(0.001)
        self.commands.append((type(command), worker_id))
        self.workers[worker_id].is_asleep = isinstance(command, Sleep)
        return CommandResults()


def parking(host, budget=8):
    config = PlannerConfig(park_level=1, max_gpu_budget=budget)
    return Parking(host, host, config, COMPONENTS)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 10))


def test_workers_that_are_added_at_once_wake_another_one_each():
    async def test():
        host = Host("m-1", "m-2", "m-3")
        parked = parking(host)
        assert [await parked.remove("m", "both") for _ in range(2)] == ["m-3", "m-2"]
        adding = [parked.add("m", "both") for _ in range(3)]
        assert sorted(await asyncio.gather(*adding)) == ["m-2", "m-3", "new-both"]
        assert sorted(host.commands[2:]) == [(WakeUp, "m-2"), (WakeUp, "m-3")] and not host.ended

    run(test)


def test_the_router_knows_which_workers_sleep_by_the_planners_word():
    async def test():
        host = Host("m-1", "m-2")
        parked = parking(host)
        assert await parked.remove("m", "both") == "m-2"
        assert list(host.parked_ids()) == ["m-2"]
        assert await parked.add("m", "both") == "m-2" and not list(host.parked_ids())

    run(test)


def test_a_worker_that_the_router_does_not_know_ends_and_no_parked_one_in_its_place():
    async def test():
        host = Host("m-1", "m-2", "m-3")
        parked = parking(host)
        assert await parked.remove("m", "both") == "m-3"
        del host.workers["m-2"]  # it has died, and starts again
        assert await parked.remove("m", "both") == "m-2"
        assert host.ended == ["m-2"]
        assert await parked.add("m", "both") == "m-3"

    run(test)


def test_a_worker_that_does_not_come_to_its_sleep_is_not_awaited_for_ever(monkeypatch):
    """A request may run for hours, and the planner decides nothing meanwhile."""

    async def test():
        host = Host("m-1", "m-2")
        monkeypatch.setattr(parking_module, "GRACE_S", 0.05)
        monkeypatch.setattr(host, "command", lambda *_, **__: asyncio.sleep(600))
        parked = parking(host)
        with pytest.raises(UnavailableError, match=r"m-2 did not finish sleep within 0\.05 s"):
            await parked.remove("m", "both")
        assert not host.ended and host.noted == {"m-2": False}

    run(test)


def test_a_worker_that_falls_asleep_without_an_answer_is_parked():
    async def test():
        host = Host("m-1", "m-2")

        async def command(command, worker_ids, *, model, rolling):
            host.workers["m-2"].is_asleep = True
            return CommandResults(errors={"m-2": UnavailableError("its connection broke")})

        host.command, said = command, host.command
        parked = parking(host)
        assert await parked.remove("m", "both") == "m-2" and host.noted == {"m-2": True}
        host.command = said
        assert await parked.add("m", "both") == "m-2" and host.noted == {"m-2": False}

    run(test)


def test_what_sleeps_is_not_removed_again():
    async def test():
        host = Host("m-1")
        parked = parking(host)
        assert await parked.remove("m", "both") == "m-1"
        with pytest.raises(UnavailableError, match="no both worker of m that is awake"):
            await parked.remove("m", "both")
        assert not host.ended

    run(test)


def test_workers_that_are_added_at_once_stay_within_the_budget():
    """Each found room for one more worker, and there was room for one."""

    async def test():
        host = Host("m-1", "m-2", "m-3")
        parked = parking(host, budget=4)
        for _ in range(2):
            await parked.remove("m", "both")
        await asyncio.gather(*(parked.add("m", "prefill") for _ in range(2)))
        assert host.ended == ["m-3"] and len(host.names) == 4

    run(test)


def test_what_sleeps_is_known_to_who_takes_the_fleet_over():
    async def test():
        host = Host("m-1", "m-2")
        await parking(host).remove("m", "both")
        next_one = parking(host)
        await next_one.start()
        assert await next_one.add("m", "both") == "m-2"
        assert host.commands[-1] == (WakeUp, "m-2") and host.noted == {"m-2": False}

    run(test)


def test_no_worker_sleeps_without_a_note_for_who_takes_the_fleet_over(monkeypatch):
    """A fleet that was killed as its worker fell asleep, or woke, left it asleep for ever: the next one started
    another in its place."""

    async def test():
        host = Host("m-1", "m-2")
        noted, command = [], host.command

        async def looked_at(*arguments, **options):
            noted.append(host.noted["m-2"])
            found = await command(*arguments, **options)
            noted.append(host.noted["m-2"])
            return found

        monkeypatch.setattr(host, "command", looked_at)
        parked = parking(host)
        await parked.remove("m", "both")
        assert await parked.add("m", "both") == "m-2"
        assert noted == [True] * 4 and host.noted == {"m-2": False}

    run(test)


def test_who_was_parked_first_makes_room_for_another_role():
    async def test():
        host = Host("m-1", "m-2", "m-3")
        parked = parking(host, budget=3)
        for _ in range(2):
            await parked.remove("m", "both")
        assert await parked.add("m", "prefill") == "new-prefill"
        assert host.ended == ["m-3"] and host.names == ["m-1", "m-2", "new-prefill"]

    run(test)
