"""The embedded registry inside one process, on virtual time: leases to the tenth of a second, the same
in every run."""

import asyncio
from random import Random

import msgspec
import pytest

from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.registry import embedded
from shoal.fleet.registry.embedded import EmbeddedRegistry, Host
from shoal.fleet.registry.hub import Announce, Hub, Members, Register, Renew
from shoal.fleet.registry.registry import Member

LEASE_S = 6.0


class Note(msgspec.Struct):
    n: int


def member(member_id: str) -> Member:
    return Member(id=member_id, role="both", address="http://127.0.0.1:9001")


class Fleet:
    """A hub and registries of this process. `kill` stops one without a Bye."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.clock, self.lease_s = LoopClock(), lease_s
        self.host, self.random = Host(self.clock, lease_s), Random(0)

    def registry(self) -> EmbeddedRegistry:
        return EmbeddedRegistry.of_host(self.host, self.clock, self.random, self.lease_s)

    def kill(self, registry: EmbeddedRegistry) -> None:
        for task in registry._tasks:
            task.cancel()


async def when(registry, ids: set[str]) -> float:
    async for members in registry.watch():
        if set(members) == ids:
            return registry.clock.now()
    raise AssertionError


def test_a_registry_that_never_answers_is_logged_once_and_awaited(caplog):
    class Nobody:
        def try_send(self, payload):
            return True

        async def receive(self):
            await asyncio.Event().wait()

        def close(self):
            pass

    async def main():
        registry = EmbeddedRegistry(LoopClock(), Random(0), LEASE_S, lambda name: Nobody())
        registering = asyncio.create_task(registry.register(member("w")))
        await asyncio.sleep(LEASE_S - 1)
        assert not caplog.records
        await asyncio.sleep(100)
        assert [record.message for record in caplog.records] == [
            "no router hosts the plane yet; still waiting"
        ]
        assert not registering.done()
        registering.cancel()
        for task in registry._tasks:
            task.cancel()

    run_virtual(main())


@pytest.mark.parametrize("lease_s", [1.0, 6.0, 60.0])
@pytest.mark.parametrize("lived_s", [0.0, 1.3, 100.0])
def test_a_dead_process_is_gone_within_its_lease_and_not_at_once(lease_s, lived_s):
    async def main():
        fleet = Fleet(lease_s)
        watcher, dying = fleet.registry(), fleet.registry()
        await dying.register(member("w"))
        await when(watcher, {"w"})
        await asyncio.sleep(lived_s)
        died_at = fleet.clock.now()
        fleet.kill(dying)
        return await when(watcher, set()) - died_at

    assert lease_s / 2 < run_virtual(main()) <= lease_s


def test_an_hour_of_leases_takes_no_time_and_loses_nobody():
    async def main():
        fleet = Fleet()
        watcher, workers = fleet.registry(), [fleet.registry() for _ in range(8)]
        for i, registry in enumerate(workers):
            await registry.register(member(f"w{i}"))
        await when(watcher, {f"w{i}" for i in range(8)})
        changes = []

        async def watch():
            async for members in watcher.watch():
                changes.append(len(members))

        watching = asyncio.create_task(watch())
        await asyncio.sleep(3600)
        watching.cancel()
        return changes, fleet.clock.now()

    changes, now = run_virtual(main())
    assert changes == [8] and now >= 3600


def test_the_time_in_which_a_hub_stood_still_ends_no_lease():
    """A suspended process, or a clock that jumped: the messages of that time are not read yet."""
    hub = Hub(now=0.0, lease_s=LEASE_S)
    encode = msgspec.msgpack.encode
    hub.take("w", encode(Announce(LEASE_S, [])), 0.0)
    hub.take("w", encode(Register(1, member("w"))), 0.0)
    hub.take("v", encode(Announce(LEASE_S, [])), 0.0)
    hub.tick(0.1)
    list(hub.sends())
    hub.tick(1000.0)
    assert all(message.members for _, message in hub.sends()), "w is there"
    for tenth in range(70):
        hub.take("v", encode(Renew(2)), 1000.0 + tenth / 10)
        hub.tick(1000.0 + tenth / 10)
    lists = [message for _, message in hub.sends() if isinstance(message, Members)]
    assert [message.members for message in lists][-1] == {}, "w has said nothing for a lease since"


def test_a_process_that_reads_nothing_costs_the_hub_a_bounded_memory(monkeypatch):
    monkeypatch.setattr(embedded, "HIGH_WATER", 100)

    async def main():
        fleet = Fleet()
        publisher, stopped = fleet.registry(), fleet.registry()
        await stopped.subscribe("events", Note)
        fleet.kill(stopped)
        for n in range(500):
            await publisher.publish("events", Note(n))
        await asyncio.sleep(1)
        return fleet.host.num_dropped

    assert run_virtual(main()) >= 400


class Link:
    """A connection that loses what the hub sends while it is deaf, and sends nothing while it is full."""

    def __init__(self, connection):
        self._connection, self.is_deaf, self.is_full = connection, False, False

    def try_send(self, payload):
        return not self.is_full and self._connection.try_send(payload)

    async def receive(self):
        while True:
            payload = await self._connection.receive()
            if not self.is_deaf:
                return payload

    def close(self):
        self._connection.close()


@pytest.mark.parametrize("is_queued", [False, True])
def test_an_answer_waits_for_the_hub_that_its_process_has_lost(is_queued):
    """Regression: the answer was dropped, and the requester, who had not lost the hub, waited for ever."""

    async def main():
        fleet, links = Fleet(), []

        def connect(name):
            links.append(Link(embedded._LocalConnection(fleet.host, name)))
            return links[-1]

        a, b = fleet.registry(), EmbeddedRegistry(fleet.clock, fleet.random, LEASE_S, connect)
        began, may_answer = asyncio.Event(), asyncio.Event()

        async def work(note: Note) -> Note:
            began.set()
            await may_answer.wait()
            return Note(note.n + 1)

        async with b.serving("b", Note, work):
            await b.register(member("b"))
            asking = asyncio.create_task(a.request("b", Note(1), Note))
            await began.wait()
            [link] = links
            if is_queued:  # before the process notices that the hub is away
                link.is_full = True
                may_answer.set()
                await asyncio.sleep(1)
                link.is_deaf, link.is_full = True, False
                b._lose_hub()
            else:
                link.is_deaf = True
                await asyncio.sleep(2 * LEASE_S)
                may_answer.set()
                await asyncio.sleep(1)
            link.is_deaf = False
            async with asyncio.timeout(10 * LEASE_S):
                assert (await asking).n == 2
        await a.close()
        await b.close()

    run_virtual(main())


def test_virtual_time_reports_a_deadlock_instead_of_hanging():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(main())
