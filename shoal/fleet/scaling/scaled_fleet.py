"""`PlannedFleet`: a fleet as its planner sees and changes it, for PlannerLoop (loop.py). Workers are started
and ended by a Connector, and observed by Fleet (pool/fleet.py).

    OwnFleet       the planner is in the process that runs the fleet
    RemoteFleet    the planner is a process of its own (`shoal plan`), which sends requests by the registry

Workers belong to the process that runs the fleet, so the death of a planner changes nothing for them: its
changes continue, and the next planner sees them as pending. A planner is a member of the registry; its id is
the lock that keeps a second planner out.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.connectors.connector import LOOK_S, Component, Connector, InFlight
from shoal.fleet.planner.observation import Observation
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.registry.registry import Member, Registry
from shoal.fleet_views import PlannerView

logger = logging.getLogger(__name__)

SUPERVISOR, PLANNER = "supervisor", "planner"  # roles of members

ROLE_S = 30.0  # a worker changes its role, and registers it, within this time
OBSERVE_S = 10.0  # limit for an observation
CHANGE_S = 3600.0  # limit for a change: a reply that was lost must not hold up the planner for ever

A = TypeVar("A")


class PlannedFleet(Protocol):
    def show(self, view: Callable[[], PlannerView]) -> None:
        """Makes the fleet show this as its planner from now on."""
        ...

    async def observe(self) -> Mapping[str, Observation]:
        """Returns an observation of each model's workers. Raises UnavailableError where the fleet does not
        answer."""
        ...

    async def add(self, model: str, role: str) -> str:
        """As Connector.add."""
        ...

    async def remove(self, model: str, role: str) -> str:
        """As Connector.remove."""
        ...

    async def change_role(self, model: str, role: str, to: str) -> str:
        """Changes the role of one worker from `role` to `to`. Returns its id when it has the new role. Raises
        UnavailableError if no worker has the role, and ConfigError if the worker cannot change it."""
        ...


class OwnFleet:
    """The fleet of this process."""

    def __init__(self, fleet: Fleet, connector: Connector, components: Sequence[Component]) -> None:
        self._fleet, self._connector = fleet, connector
        self._changes: dict[str, InFlight] = collections.defaultdict(InFlight)  # by model
        # By model; included in _changes.
        self._removals: dict[str, InFlight] = collections.defaultdict(InFlight)
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
            # A change in flight may not show at the connector yet, and one of a planner that died is no
            # longer counted by its loop.
            pending = max(self._connector.pending(model), self._changes[model].count)
            leaving = self._removals[model].count  # the planner has them drain or fall asleep
            found[model] = msgspec.structs.replace(
                seen,
                pending=pending,
                draining=max(0, seen.draining - leaving),
                paused=max(0, seen.paused - max(0, leaving - seen.draining)),
            )
        return found

    async def add(self, model: str, role: str) -> str:
        with self._changes[model].one_more():
            return await self._connector.add(model, role)

    async def remove(self, model: str, role: str) -> str:
        with self._changes[model].one_more(), self._removals[model].one_more():
            return await self._connector.remove(model, role)

    async def change_role(self, model: str, role: str, to: str) -> str:
        """Changes the worker with the fewest requests, which continue."""
        with self._changes[model].one_more():
            worker_id = self._fleet.least_loaded(model, role)
            if worker_id is None:
                raise UnavailableError(f"{model} has no worker of the role {role!r} that could change it")
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


# Requests of a planner in a process of its own to the process that runs the fleet


class _PlannerMessage(msgspec.Struct, tag=True, frozen=True):
    """Base of the requests below."""


class Observe(_PlannerMessage, frozen=True):
    """Asks for Observed. `view`: the fleet shows it as its planner's."""

    view: PlannerView


class AddWorker(_PlannerMessage, frozen=True):
    model: str
    role: str


class RemoveWorker(_PlannerMessage, frozen=True):
    model: str
    role: str


class SwitchRole(_PlannerMessage, frozen=True, tag="ChangeRole"):
    """Changes the role of one worker."""

    model: str
    role: str
    to: str


PlannerRequest = Observe | AddWorker | RemoveWorker | SwitchRole


class Observed(msgspec.Struct, frozen=True):
    models: dict[str, Observation]


class Changed(msgspec.Struct, frozen=True):
    worker_id: str


class PlannerPort:
    """Serves a planner in another process. `name`: the fleet's member id in the registry."""

    def __init__(self, fleet: OwnFleet, registry: Registry, name: str) -> None:
        self._fleet, self._registry, self._name = fleet, registry, name

    async def run(self) -> None:
        """Serves until it is cancelled, which also cancels the changes under way."""
        # The registration comes first, because it is refused if another process has the name: that process
        # alone may answer.
        await self._registry.register(Member(id=self._name, role=SUPERVISOR, address=""))
        requests: Any = PlannerRequest  # a union, which msgspec decodes by its tags
        async with self._registry.serving(self._name, requests, self._answer):
            async for members in self._registry.watch():
                if _planner_of(self._name) not in members:
                    self._fleet.show(None)

    async def _answer(self, request: PlannerRequest) -> msgspec.Struct:
        if isinstance(request, Observe):
            self._fleet.show(lambda: request.view)
            return Observed(await self._fleet.observe())
        try:
            return Changed(await self._change(request))
        except ShoalError as error:  # in this log, too, as the planner may have died meanwhile
            logger.error("a change requested by the planner failed: %s", error)
            raise

    async def _change(self, request: AddWorker | RemoveWorker | SwitchRole) -> str:
        match request:
            case AddWorker():
                return await self._fleet.add(request.model, request.role)
            case RemoveWorker():
                return await self._fleet.remove(request.model, request.role)
            case SwitchRole():
                return await self._fleet.change_role(request.model, request.role, request.to)


class RemoteFleet:
    """The fleet `name` of another process in this registry."""

    def __init__(self, registry: Registry, name: str) -> None:
        self._registry, self._name = registry, name
        self._view: Callable[[], PlannerView] | None = None

    def show(self, view: Callable[[], PlannerView]) -> None:
        self._view = view

    async def observe(self) -> Mapping[str, Observation]:
        assert self._view is not None, "a planner shows itself first"
        try:
            return (await self._request(Observe(self._view()), Observed, OBSERVE_S)).models
        except ShoalError as error:  # a lost reply, say: the next request may succeed
            raise UnavailableError(f"fleet {self._name} does not report its workers: {error}") from None

    async def add(self, model: str, role: str) -> str:
        return (await self._request(AddWorker(model, role), Changed, CHANGE_S)).worker_id

    async def remove(self, model: str, role: str) -> str:
        return (await self._request(RemoveWorker(model, role), Changed, CHANGE_S)).worker_id

    async def change_role(self, model: str, role: str, to: str) -> str:
        return (await self._request(SwitchRole(model, role, to), Changed, CHANGE_S)).worker_id

    async def _request(self, request: PlannerRequest, type_: type[A], timeout_s: float) -> A:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._registry.request(self._name, request, type_)
        except TimeoutError:
            raise UnavailableError(f"fleet {self._name} has not replied within {timeout_s:g} s") from None


async def find_fleet(registry: Registry, own: str) -> str:
    """Waits for a fleet in this registry and returns its name. `own`: the name of a fleet that is started
    here from the same file, which is taken among several. Raises ConfigError if several fleets have other
    names."""
    async for members in registry.watch():
        names = [name for name, member in members.items() if member.role == SUPERVISOR]
        if own in names or len(names) == 1:
            return own if own in names else names[0]
        if names:
            raise ConfigError(
                "plane must have one fleet, or one that was started here from this file, got "
                f"{', '.join(names)}; start the planner on the host of its fleet"
            )
    raise UnavailableError("the plane was closed")


async def become_planner(registry: Registry, name: str) -> None:
    """Makes this process the only planner of the fleet until it leaves the registry. Raises ConfigError if
    another process is the planner, which is certain after the time of a lease."""
    try:
        await registry.register(Member(id=_planner_of(name), role=PLANNER, address=""))
    except ConfigError:
        raise ConfigError(
            f"another process is the planner of the fleet {name} already (shoal plan, or a fleet with "
            "[planner] enabled); end that one"
        ) from None


def _planner_of(name: str) -> str:
    return f"{name}-planner"
