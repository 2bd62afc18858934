"""`LocalConnector`: a Connector that assigns numbers, GPUs and ports to workers, and records them
(state_file.py). A Supervisor runs them: child processes (processes.py), Circus (circus.py) or actors of a Ray
cluster (ray.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from shoal.errors import ConfigError, ShoalError, UnavailableError, UnknownWorkerError
from shoal.fleet.connectors.connector import (
    GRACE_S,
    LOOK_S,
    Component,
    ConnectorContext,
    component_of,
    is_missing,
    poll_until,
)
from shoal.fleet.connectors.state_file import Placement, ProcessId, State, StateFile
from shoal.fleet_views import WorkerState
from shoal.tasks import start, stop

logger = logging.getLogger(__name__)

# Limit for the requests of an external worker that is to end. A request that cannot continue on another
# worker breaks with it and may take minutes, but a hanging one must not keep the worker for ever. NVIDIA
# Dynamo waits as long.
DRAIN_S = 600.0
GONE_S = 60.0  # limit for the router to notice that a worker has ended; a lease is much shorter
WATCH_S = 1.0  # between two polls of the workers' processes


class Running(NamedTuple):
    """A worker as its supervisor knows it. `pid`: None between two processes, and on another host."""

    pid: int | None
    is_crash_looping: bool  # it died too often and is not restarted


class Supervisor(Protocol):
    """Keeps the workers' processes running, by worker id."""

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Called once, before the other methods. `leftovers`: the workers' processes from before a crash. The
        supervisor takes them over or ends them."""
        ...

    async def running(self) -> Mapping[str, Running]: ...

    async def start(self, placement: Placement) -> None:
        """Does not wait for the worker. Raises UnavailableError if the start cannot be attempted."""
        ...

    async def stop(self, worker_id: str, grace_s: float) -> None:
        """Sends SIGTERM, kills the worker after `grace_s` seconds, and returns when it has ended. An unknown
        id changes nothing."""
        ...

    async def close(self, grace_s: float) -> None:
        """Ends all workers at the same time. May be called again with a shorter grace while it runs."""
        ...


class KeptWorker(Protocol):
    async def stop(self, grace_s: float) -> None: ...


K = TypeVar("K", bound=KeptWorker)


class WorkersById(Generic[K]):
    """The common part of supervisors that hold their workers in this process."""

    def __init__(self) -> None:
        self._workers: dict[str, K] = {}

    async def stop(self, worker_id: str, grace_s: float) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            await worker.stop(grace_s)
            self._workers.pop(worker_id, None)

    async def close(self, grace_s: float) -> None:
        await asyncio.gather(*(self.stop(worker_id, grace_s) for worker_id in list(self._workers)))


class LocalConnector:
    """A Connector. A worker that crash-loops, or was missing for longer than a start may take, stays listed,
    so that people see it. Its slot goes to the next worker that is added and finds no other room."""

    def __init__(self, context: ConnectorContext, supervisor: Supervisor) -> None:
        self._components, self._router = context.components, context.router
        self._clock, self._start_timeout_s = context.clock, context.start_timeout_s
        self._supervisor, self._file = supervisor, StateFile(context.folder)
        self._placed: dict[str, Placement] = {}  # placed or taken over by this process
        self._running: Mapping[str, Running] = {}  # at the last poll
        self._missing_since: dict[str, float] = {}  # workers that should be ready and are not
        self._placing = asyncio.Lock()
        self._has_begun = False
        self._woken: set[str] = set()  # workers that the next poll records as no longer parked
        self._starting: set[str] = set()  # workers that `begin` waits for
        self._replacing: set[str] = set()  # starting workers that replace a crash-looping one
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        with self._file.changing() as state:
            leftovers = state.processes
            kept, new = state.begin(self._components)
        self._has_begun = True
        await self._supervisor.open(leftovers)
        running = await self._supervisor.running()
        there = {placement.id for placement in kept if placement.id in running} - {
            name for name, one in running.items() if one.is_crash_looping
        }
        await asyncio.gather(*(self._supervisor.stop(name, GRACE_S) for name in running if name not in there))
        for placement in [*kept, *new]:
            await self._launch(placement, is_running=placement.id in there)
        self._tasks.append(start(self._watch()))
        await self._poll()

    def pending(self, model: str) -> int:
        state = self._file.read()
        self._update_missing(state)
        placements = [
            placement
            for component in self._components
            if component.model == model
            for placement in state.placements(component)
        ]
        return sum(
            self._clock.now() - self._missing_since[placement.id] < self._start_timeout_s
            for placement in placements
            if placement.id in self._missing_since
        )

    def _update_missing(self, state: State) -> None:
        now, missing = self._clock.now(), self._missing_since
        self._missing_since = {
            placement.id: missing.get(placement.id, now)
            for component in self._components
            for placement in state.placements(component)
            if self._is_missing(placement.id)
        }

    async def add(self, model: str, role: str) -> str:
        return await self.begin(await self.place(model, role))

    async def place(self, model: str, role: str) -> Placement:
        """Takes a place for one more worker, which `begin` then starts. The slot of a failed worker of this
        component is taken first; failed workers of other components make room only if too few GPUs are free.
        Raises ConfigError as `add` does."""
        component = component_of(self._components, model, role)
        async with self._placing:  # so that a concurrent call finds this place taken
            await self._poll()
            own, others = self._failed_workers(component)
            if own:
                return await self._replace(own[:1], component)
            try:
                return self._take(component)
            except ConfigError:  # too few GPUs are free
                enough = self._enough_of(others, component)
                if not enough:
                    raise
            return await self._replace(enough, component)

    async def begin(self, placement: Placement) -> str:
        """Starts a placed worker and waits until it is ready: the second half of `add`."""
        self._missing_since.pop(placement.id, None)
        self._starting.add(placement.id)
        try:
            await self._launch(placement)
            await self._until_ready(placement)
        except ShoalError:
            if not await self._crash_loops_again(placement):
                await self._end(placement)
            with contextlib.suppress(UnavailableError):
                await self._poll()  # so that the worker that was taken back does not count as crash-looping
            raise
        finally:
            self._starting.discard(placement.id)
            self._replacing.discard(placement.id)
        await self._poll()
        return placement.id

    async def remove(self, model: str, role: str) -> str:
        await self._poll()
        found = self._with_role(model, role)
        if not found:
            component_of(self._components, model, role)
            raise UnavailableError(f"this fleet has no {role} worker of {model} to remove")
        await self._end(found[-1])
        await self._until_gone(found[-1].id)
        return found[-1].id

    def placed(self, model: str, role: str) -> list[str]:
        """Returns the ids of the model's workers with this role; `remove` would end the last one."""
        return [placement.id for placement in self._with_role(model, role)]

    def _with_role(self, model: str, role: str) -> list[Placement]:
        """Returns the workers that have this role now, by number. Workers of components with another role
        come last; failed workers come first, as removing one would not reduce the serving workers."""
        state = self._file.read()
        found = [
            (not self._has_failed(placement.id), component.role != role, placement)
            for component in self._components
            if component.model == model
            for placement in state.placements(component)
            if (self._router.role_of(placement.id) or component.role) == role
        ]
        return [placement for *_, placement in sorted(found, key=lambda each: each[:2])]

    def roles(self) -> list[str]:
        """Returns the role of each worker that has not failed."""
        state = self._file.read()
        return [
            one.role
            for one in self._components
            for placement in state.placements(one)
            if not self._has_failed(placement.id)
        ]

    def parked(self) -> list[tuple[str, str, str]]:
        """Returns id, model and role of each worker that is recorded as parked, the highest number first."""
        state = self._file.read()
        return [
            (placement.id, component.model, component.role)
            for component in self._components
            for placement in reversed(state.placements(component))
            if state.is_parked(placement)
        ]

    def record_parked(self, worker_id: str, is_parked: bool) -> None:
        """Records whether a worker is parked, for the next supervisor if this one is killed. A sleeping
        worker is on disk when this returns; raises OSError if that fails. A waking one may be recorded later,
        as the next supervisor sees that it is awake."""
        if not is_parked:
            self._woken.add(worker_id)
            return
        with self._file.changing() as state:
            self._park(state, worker_id, True)
        self._woken.discard(worker_id)

    async def end(self, worker_id: str) -> None:
        """Ends this worker as `remove` does; an unknown id changes nothing."""
        state = self._file.read()
        for component in self._components:
            for placement in state.placements(component):
                if placement.id == worker_id:
                    await self._end(placement)
                    await self._until_gone(worker_id)

    async def wait_until_all_failed(self) -> None:
        while (
            self._placing.locked()
            or self._starting
            or not self._running
            or not all(one.is_crash_looping for one in self._running.values())
        ):
            await self._clock.sleep(WATCH_S)

    async def close(self, grace_s: float) -> None:
        await stop(self._tasks)
        await self._supervisor.close(grace_s)
        if not self._has_begun:  # the file lists workers that a killed fleet has left, for the next start
            return
        try:
            with self._file.changing() as state:
                state.supervisor = None
                for entry in state.components.values():
                    entry.workers = {}
        except OSError as error:
            logger.error("%s still lists workers, which have ended: %s", self._file.path, error)

    def _take(self, component: Component) -> Placement:
        with self._file.changing() as state:
            return state.place(component, self._running)

    async def _replace(self, failed: Sequence[Placement], component: Component) -> Placement:
        """Frees the slots of these failed workers and allocates a new one."""
        is_crash_looping = any(self._is_crash_looping(placement.id) for placement in failed)
        for placement in failed:
            await self._end(placement)
        await self._poll()
        found = self._take(component)
        if is_crash_looping:
            self._replacing.add(found.id)
        return found

    def _failed_workers(self, component: Component) -> tuple[list[Placement], list[Placement]]:
        """Returns the failed workers of this component, by number, and of the components that share its
        GPUs."""
        state = self._file.read()
        own = [placement for placement in state.placements(component) if self._has_failed(placement.id)]
        others = [
            placement
            for other in self._components
            if other.name != component.name and other.shares_devices and component.shares_devices
            for placement in state.placements(other)
            if self._has_failed(placement.id)
        ]
        return own, others

    def _enough_of(self, failed: Sequence[Placement], component: Component) -> Sequence[Placement]:
        """Returns the shortest prefix of `failed` whose GPUs, with the free ones, suffice for a worker of
        this component; empty if all of them do not."""
        for count in range(1, len(failed) + 1):
            state = self._file.read()
            for placement in failed[:count]:
                state.free(placement)
            with contextlib.suppress(ConfigError):
                state.place(component, self._running)
                return failed[:count]
        return []

    async def _crash_loops_again(self, placement: Placement) -> bool:
        """Returns True if the replacement of a crash-looping worker crash-loops too. Such a worker stays
        listed, as `wait_until_all_failed` counts it."""
        if placement.id in self._replacing:
            with contextlib.suppress(UnavailableError):
                running = (await self._supervisor.running()).get(placement.id)
                return running is not None and running.is_crash_looping
        return False

    async def _launch(self, placement: Placement, is_running: bool = False) -> None:
        if not is_running:
            await self._supervisor.start(placement)
        self._placed[placement.id] = placement
        if placement.spec is not None:
            await self._router.add(placement.spec)

    async def _until_ready(self, placement: Placement) -> None:
        deadline = self._clock.now() + self._start_timeout_s
        while self._router.state_of(placement.id) != WorkerState.READY:
            running = (await self._supervisor.running()).get(placement.id)
            if running is None or running.is_crash_looping:
                outcome = "not restarted" if placement.id in self._replacing else "taken back"
                raise UnavailableError(
                    f"worker {placement.id} does not stay alive and is {outcome}; its lines in the log say "
                    "why"
                )
            if self._clock.now() >= deadline:
                raise UnavailableError(
                    f"worker {placement.id} was not ready within {self._start_timeout_s:g} s (start_timeout) "
                    "and is taken back; its lines in the log say why"
                )
            await self._clock.sleep(LOOK_S)

    async def _until_gone(self, worker_id: str) -> None:
        if not await poll_until(self._clock, lambda: self._router.state_of(worker_id) is None, GONE_S):
            raise UnavailableError(
                f"worker {worker_id} has ended, and the router still lists it after {GONE_S:g} s; check that "
                "no other process has its id"
            )

    async def _end(self, placement: Placement) -> None:
        """Ends a worker. A native one drains at SIGTERM, and its unfinished requests migrate; an external one
        may do neither, so the router retires it first. If the supervisor does not answer, the place is freed
        anyway, and the next poll takes it again for a worker that is still running."""
        if placement.spec is not None:
            try:
                with contextlib.suppress(UnknownWorkerError):
                    await asyncio.wait_for(self._router.retire(placement.id), DRAIN_S)
            except TimeoutError:
                logger.warning("%s ends with requests that did not finish within %g s", placement.id, DRAIN_S)
        self._placed[placement.id] = placement
        try:
            await self._supervisor.stop(placement.id, GRACE_S)
            self._placed.pop(placement.id, None)
        finally:
            with self._file.changing() as state:
                state.free(placement)
        if placement.spec is not None:
            with contextlib.suppress(UnknownWorkerError):  # a person has removed it
                await self._router.remove(placement.id)

    async def _watch(self) -> None:
        logged = ""
        while True:
            await self._clock.sleep(WATCH_S)
            try:
                await self._poll()
                logged = ""
            except (UnavailableError, OSError) as error:  # a disk may be full for a while
                if logged != str(error):
                    logged = str(error)
                    logger.error("running workers cannot be recorded in %s: %s", self._file.path, error)

    async def _poll(self) -> None:
        """Updates the file from the running workers."""
        known = list(self._placed)  # without workers that start during the call
        self._running = running = await self._supervisor.running()
        for name in known:
            if name not in running:
                self._placed.pop(name, None)
        with self._file.changing() as state:
            if self._tasks:
                state.supervisor = ProcessId.of(os.getpid())
            for placement in self._placed.values():
                state.adopt(placement)
            state.see({name: one.pid for name, one in running.items()})
            self._update_missing(state)
            woken = set(self._woken)
            for worker_id in woken:
                self._park(state, worker_id, False)
        self._woken -= woken

    def _park(self, state: State, worker_id: str, is_parked: bool) -> None:
        for component in self._components:
            for placement in state.placements(component):
                if placement.id == worker_id:
                    state.park(placement, is_parked)

    def _is_missing(self, worker_id: str) -> bool:
        return not self._is_crash_looping(worker_id) and is_missing(self._router.state_of(worker_id))

    def _has_failed(self, worker_id: str) -> bool:
        """Returns True if the worker crash-loops, or has been missing for longer than a start may take, so
        that `pending` no longer counts it."""
        since = self._missing_since.get(worker_id, math.inf)
        is_old = self._clock.now() - since >= self._start_timeout_s
        is_lost = is_old and self._is_missing(worker_id) and worker_id not in self._starting
        return is_lost or self._is_crash_looping(worker_id)

    def _is_crash_looping(self, worker_id: str) -> bool:
        running = self._running.get(worker_id)
        return running is not None and running.is_crash_looping
