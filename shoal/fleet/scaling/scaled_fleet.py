"""A fleet as its planner has it: what it sees of the workers, and how it has them come and go.

    OwnFleet       the planner is in the process that runs the fleet
    RemoteFleet    the planner is a process of its own (`shoal plan`), and asks that one on the plane

Workers belong to the process that runs the fleet, so the death of a planner changes nothing for them: what it
had begun goes on, and the next planner sees it as pending. A planner is a member of the plane, whose id no
second one gets.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.connectors.connector import LOOK_S, Component, Connector, UnderWay
from shoal.fleet.planner.observation import Observation
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.registry.registry import Member, Plane
from shoal.fleet.registry.streams import Handler
from shoal.fleet.tasks import stop
from shoal.fleet_views import PlannerView

logger = logging.getLogger(__name__)

SUPERVISOR, PLANNER = "supervisor", "planner"  # roles on the plane

ROLE_S = 30.0  # for a worker to change its role, and to say so on the plane

A = TypeVar("A")
T = TypeVar("T")


class PlannedFleet(Protocol):
    def show(self, view: Callable[[], PlannerView]) -> None:
        """The fleet shows this as its planner from now on."""
        ...

    async def observe(self) -> Mapping[str, Observation]:
        """What each model's workers do now. Raises UnavailableError where the fleet does not answer."""
        ...

    async def add(self, model: str, role: str) -> str:
        """As a Connector's."""
        ...

    async def remove(self, model: str, role: str) -> str:
        """As a Connector's."""
        ...

    async def change_role(self, model: str, role: str, to: str) -> str:
        """A worker of the role `role` has the role `to` from now on. Returns its id when that is so. Raises
        UnavailableError if there is none, and ConfigError if it cannot."""
        ...


class OwnFleet:
    """The fleet of this process."""

    def __init__(self, fleet: Fleet, connector: Connector, components: Sequence[Component]) -> None:
        self._fleet, self._connector = fleet, connector
        self._changes: dict[str, UnderWay] = collections.defaultdict(UnderWay)  # by model
        self._removals: dict[str, UnderWay] = collections.defaultdict(UnderWay)  # those among them
        self._decode_roles: dict[str, str] = {}  # by model
        for component in components:
            if component.role == "decode":
                self._decode_roles[component.model] = "decode"
            self._decode_roles.setdefault(component.model, "both")

    def show(self, view: Callable[[], PlannerView] | None) -> None:
        self._fleet.planner_view = view

    async def observe(self) -> dict[str, Observation]:
        found = {}
        for model, role in self._decode_roles.items():
            seen = self._fleet.observe(model, role)
            pending = max(seen.pending + self._connector.pending(model), self._changes[model].count)
            leaving = self._removals[model].count  # they drain, or fall asleep, by the planner's word
            found[model] = msgspec.structs.replace(
                seen,
                pending=pending,
                draining=max(0, seen.draining - leaving),
                resting=max(0, seen.resting - max(0, leaving - seen.draining)),
            )
        return found

    async def add(self, model: str, role: str) -> str:
        with self._changes[model].one_more():
            return await self._connector.add(model, role)

    async def remove(self, model: str, role: str) -> str:
        with self._changes[model].one_more(), self._removals[model].one_more():
            return await self._connector.remove(model, role)

    async def change_role(self, model: str, role: str, to: str) -> str:
        """The one with the fewest requests, which go on."""
        with self._changes[model].one_more():
            worker_id = self._fleet.idlest(model, role)
            if worker_id is None:
                raise UnavailableError(f"there is no {role} worker of {model} that could change its role")
            try:
                async with asyncio.timeout(ROLE_S):
                    await self._fleet.change_role(worker_id, to)
                    while self._fleet.role_of(worker_id) != to:
                        await asyncio.sleep(LOOK_S)
            except TimeoutError:
                raise UnavailableError(
                    f"worker {worker_id} has not changed its role in {ROLE_S:g} s"
                ) from None
            return worker_id


# On the plane: services of the process that runs the fleet, NAME.look, NAME.add, NAME.remove and NAME.role


class Look(msgspec.Struct, frozen=True):
    """`view`: what the fleet shows of its planner."""

    view: PlannerView


class Seen(msgspec.Struct, frozen=True):
    models: dict[str, Observation]


class Wanted(msgspec.Struct, frozen=True):
    """One worker more, or less."""

    model: str
    role: str


class NewRole(msgspec.Struct, frozen=True):
    """For one worker."""

    model: str
    role: str
    to: str


class Changed(msgspec.Struct, frozen=True):
    worker_id: str


class PlannerPort:
    """How a planner in a process of its own reaches this fleet. `name`: of the fleet, on its plane."""

    def __init__(self, fleet: OwnFleet, plane: Plane, name: str) -> None:
        self._fleet, self._plane, self._name = fleet, plane, name
        self._changes: set[asyncio.Task[str]] = set()

    async def run(self) -> None:
        """Until it is cancelled, and all that a planner has begun with it."""
        serve = self._plane.serve
        closing = [
            await serve(f"{self._name}.look", Look, self._look),
            await serve(f"{self._name}.add", Wanted, self._changing_by(self._add)),
            await serve(f"{self._name}.remove", Wanted, self._changing_by(self._remove)),
            await serve(f"{self._name}.role", NewRole, self._changing_by(self._change_role)),
        ]
        try:
            await self._plane.register(Member(id=self._name, role=SUPERVISOR, address=""))
            async for members in self._plane.watch():
                if _planner_of(self._name) not in members:
                    self._fleet.show(None)
        finally:
            for close in closing:
                close()
            await stop(self._changes)

    async def _look(self, look: Look) -> AsyncGenerator[msgspec.Struct, None]:
        self._fleet.show(lambda: look.view)
        yield Seen(await self._fleet.observe())

    async def _add(self, wanted: Wanted) -> str:
        return await self._fleet.add(wanted.model, wanted.role)

    async def _remove(self, wanted: Wanted) -> str:
        return await self._fleet.remove(wanted.model, wanted.role)

    async def _change_role(self, new: NewRole) -> str:
        return await self._fleet.change_role(new.model, new.role, new.to)

    def _changing_by(self, change: Callable[[T], Coroutine[Any, Any, str]]) -> Handler[T]:
        async def answer(wanted: T) -> AsyncGenerator[msgspec.Struct, None]:
            task = asyncio.create_task(change(wanted))
            self._changes.add(task)
            task.add_done_callback(self._ended)
            yield Changed(await asyncio.shield(task))  # it goes on when the planner dies

        return answer

    def _ended(self, change: asyncio.Task[str]) -> None:
        """Says in this log, too, why a change failed: its planner may be gone by now."""
        self._changes.discard(change)
        if not change.cancelled() and (error := change.exception()) is not None:
            logger.error("a change that the planner asked for failed: %s", error)


class RemoteFleet:
    """The fleet `name` of another process on this plane."""

    def __init__(self, plane: Plane, name: str) -> None:
        self._plane, self._name = plane, name
        self._view: Callable[[], PlannerView] | None = None

    def show(self, view: Callable[[], PlannerView]) -> None:
        self._view = view

    async def observe(self) -> Mapping[str, Observation]:
        assert self._view is not None, "a planner shows itself first"
        try:
            return (await self._ask("look", Look(self._view()), Seen)).models
        except ShoalError as error:  # a stream that was lost, say: the next look may succeed
            raise UnavailableError(f"the fleet {self._name} does not tell of its workers: {error}") from None

    async def add(self, model: str, role: str) -> str:
        return (await self._ask("add", Wanted(model, role), Changed)).worker_id

    async def remove(self, model: str, role: str) -> str:
        return (await self._ask("remove", Wanted(model, role), Changed)).worker_id

    async def change_role(self, model: str, role: str, to: str) -> str:
        return (await self._ask("role", NewRole(model, role, to), Changed)).worker_id

    async def _ask(self, what: str, request: msgspec.Struct, answer: type[A]) -> A:
        stream = await self._plane.request(f"{self._name}.{what}", request, answer)
        try:
            async for found in stream:
                return found
        finally:
            stream.close()
        raise UnavailableError(f"the fleet {self._name} has no answer to {request}")


async def find_fleet(plane: Plane, own: str) -> str:
    """The name of the fleet that runs on this plane; waits for one. `own`: that which a command with the same
    file would have here, where there are several. Raises ConfigError if it is none of these."""
    async for members in plane.watch():
        names = [name for name, member in members.items() if member.role == SUPERVISOR]
        if own in names or len(names) == 1:
            return own if own in names else names[0]
        if names:
            raise ConfigError(
                f"several fleets share this plane, {', '.join(names)}, and none of them was started here "
                "from this file; start the planner on that fleet's host"
            )
    raise UnavailableError("the plane has ended")


async def become_planner(plane: Plane, name: str) -> None:
    """This process alone plans for the fleet until it leaves the plane. Raises ConfigError if another one
    does, which is known after the time of a lease."""
    try:
        await plane.register(Member(id=_planner_of(name), role=PLANNER, address=""))
    except ConfigError:
        raise ConfigError(
            f"another process is the planner of the fleet {name} already (shoal plan, or a fleet with "
            "[planner] enabled); end that one"
        ) from None


def _planner_of(name: str) -> str:
    return f"{name}-planner"
