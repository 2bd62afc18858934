"""Workers whose places are kept in a file of this host (fleet/connectors/state_file.py). What makes them
run is a
Supervisor: this process (fleet/connectors/processes.py), another one, or the actors of a Ray cluster
(fleet/connectors/ray.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from shoal.errors import ConfigError, ShoalError, UnavailableError, UnknownWorkerError
from shoal.fleet.connectors.connector import (
    GRACE_S,
    LOOK_S,
    Component,
    ConnectorContext,
    component_of,
    is_missing,
)
from shoal.fleet.connectors.state_file import Placement, ProcessId, State, StateFile
from shoal.fleet.tasks import start, stop
from shoal.fleet_views import WorkerState

logger = logging.getLogger(__name__)

# For the requests of another engine's worker that is to end. Those that cannot go on elsewhere break with it,
# and an answer may take minutes; one that hangs must not keep it for ever. NVIDIA Dynamo waits as long.
DRAIN_S = 600.0
GONE_S = 60.0  # for the router to see that a worker has ended; a lease is much shorter
WATCH_S = 1.0  # between two looks at the workers' processes
LOCKED_S = 5.0  # for another process to let go of the state, at the end of the fleet


class Running(NamedTuple):
    """A worker as its supervisor knows it. `pid`: None between two lives, and on another host."""

    pid: int | None
    is_crash_looping: bool  # it died too often, and is not started again


class Supervisor(Protocol):
    """Keeps processes alive, by the worker's id."""

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Called once, by who runs the fleet. `leftovers`: processes of its workers before a crash; those
        that it does not take over end."""
        ...

    async def running(self) -> Mapping[str, Running]: ...

    async def start(self, placement: Placement) -> None:
        """Does not wait for the worker. Raises UnavailableError if it cannot be tried."""
        ...

    async def stop(self, worker_id: str, grace_s: float) -> None:
        """Returns when the worker has ended: by itself within `grace_s` seconds of a SIGTERM, or killed. An
        unknown id changes nothing."""
        ...

    async def close(self, grace_s: float) -> None:
        """Ends all workers at the same time. It may be called again, with less, while it runs."""
        ...


class KeptWorker(Protocol):
    async def stop(self, grace_s: float) -> None: ...


K = TypeVar("K", bound=KeptWorker)


class WorkersById(Generic[K]):
    """What supervisors have in common that keep their workers in this process."""

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
    """A Connector. `start` and `close` are for who runs the fleet; a planner in a process of its own does
    without them."""

    def __init__(self, context: ConnectorContext, supervisor: Supervisor) -> None:
        self._components, self._router = context.components, context.router
        self._clock, self._start_timeout_s = context.clock, context.start_timeout_s
        self._supervisor, self._file = supervisor, StateFile(context.folder)
        self._mine: dict[str, Placement] = {}  # what this process has placed or taken over
        self._running: Mapping[str, Running] = {}  # as it was seen last
        self._missing_since: dict[str, float] = {}  # workers that are not ready
        self._placing = asyncio.Lock()
        self._noting = asyncio.Lock()  # so that what was seen first is written first
        self._told_of_lock = False
        self._has_begun = False
        self._woken: set[str] = set()  # parked workers that are so no more, which the next look notes
        self._starting: set[str] = set()  # workers that `begin` waits for
        self._replacing: set[str] = set()  # those of them that have the place of one that was given up
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        async with self._changing() as state:
            leftovers = state.lives
            kept, new = state.begin(self._components)
        self._has_begun = True
        await self._supervisor.open(leftovers)
        running = await self._supervisor.running()
        there = {placement.id for placement in kept if placement.id in running} - {
            name for name, one in running.items() if one.is_crash_looping
        }
        await asyncio.gather(*(self._supervisor.stop(name, GRACE_S) for name in running if name not in there))
        for placement in [*kept, *new]:
            await self._begin(placement, is_there=placement.id in there)
        self._tasks.append(start(self._watch()))
        await self._look()

    def pending(self, model: str) -> int:
        state = self._file.read()
        self._note_missing(state)
        ours = [
            one
            for component in self._components
            if component.model == model
            for one in state.placements(component)
        ]
        return sum(
            self._clock.now() - self._missing_since[one.id] < self._start_timeout_s
            for one in ours
            if one.id in self._missing_since
        )

    def _note_missing(self, state: State) -> None:
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
        """Takes a place for one more worker, which `begin` then starts. The place of one that serves no more
        is taken first: it was given up and has no process, or its process has not served for so long that a
        start would have failed, and ends. Raises ConfigError as `add` does."""
        component = component_of(self._components, model, role)
        async with self._placing:  # so that another call finds this place taken
            await self._look()
            own, others = self._useless(component)
            if own:
                return await self._replace(own[:1], component)
            try:
                return await self._take(component)
            except ConfigError:  # too few GPUs are free
                enough = self._enough_of(others, component)
                if not enough:
                    raise
            return await self._replace(enough, component)

    async def begin(self, placement: Placement) -> str:
        """The second half of `add`."""
        self._missing_since.pop(placement.id, None)
        self._starting.add(placement.id)
        try:
            await self._begin(placement)
            await self._until_ready(placement)
        except ShoalError:
            if not await self._is_given_up_again(placement):
                await self._end(placement)
            with contextlib.suppress(UnavailableError):
                await self._look()  # else what was taken back would still count as given up
            raise
        finally:
            self._starting.discard(placement.id)
            self._replacing.discard(placement.id)
        await self._look()
        return placement.id

    async def remove(self, model: str, role: str) -> str:
        await self._look()
        ours = self._with_role(model, role)
        if not ours:
            component_of(self._components, model, role)
            raise UnavailableError(f"there is no {role} worker of {model} here to be removed")
        await self._end(ours[-1])
        await self._until_gone(ours[-1].id)
        return ours[-1].id

    def placed(self, model: str, role: str) -> list[str]:
        """The ids of its workers; the one that `remove` would end comes last."""
        return [placement.id for placement in self._with_role(model, role)]

    def _with_role(self, model: str, role: str) -> list[Placement]:
        """The workers that have this role now, in the order of their numbers. Those of other components come
        last, and those that serve no more first, as to end one would end nothing."""
        state = self._file.read()
        ours = [
            (not self._serves_no_more(placement.id), component.role != role, placement)
            for component in self._components
            if component.model == model
            for placement in state.placements(component)
            if (self._router.role_of(placement.id) or component.role) == role
        ]
        return [placement for *_, placement in sorted(ours, key=lambda each: each[:2])]

    def roles(self) -> list[str]:
        """The role of each worker that has a place which is not free for another one."""
        state = self._file.read()
        return [
            one.role
            for one in self._components
            for placement in state.placements(one)
            if not self._serves_no_more(placement.id)
        ]

    def parked(self) -> list[tuple[str, str, str]]:
        """Id, model and role of each worker that is noted as parked. One with the highest number comes
        first."""
        state = self._file.read()
        return [
            (placement.id, component.model, component.role)
            for component in self._components
            for placement in reversed(state.placements(component))
            if state.is_parked(placement)
        ]

    def note_parked(self, worker_id: str, is_parked: bool) -> None:
        """For who takes over the workers of this process when it is killed. That one sleeps is noted before
        this returns, else nobody would know of it: raises UnavailableError where that cannot be. That it does
        so no more may come late, as whoever takes it over sees it awake."""
        if not is_parked:
            self._woken.add(worker_id)
            return
        with self._file.changing() as state:
            self._park(state, worker_id, True)
        self._woken.discard(worker_id)

    async def end(self, worker_id: str) -> None:
        """Ends this worker, as `remove` does; an unknown one changes nothing."""
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
        if not self._has_begun:  # it names what a fleet that was killed has left, for the next one
            return
        try:
            async with asyncio.timeout(LOCKED_S), self._changing() as state:
                state.supervisor = None
                for entry in state.components.values():
                    entry.workers = {}
        except TimeoutError:
            logger.error(
                "%s still names workers, which have ended: another process has it locked", self._file.path
            )
        except OSError as error:
            logger.error("%s still names workers, which have ended: %s", self._file.path, error)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[State]:
        """As StateFile.changing, but it waits until no other process holds the state. The block has no await
        in it. Blocks are entered in the order in which they were asked for."""
        begun = self._clock.now()
        async with self._noting:
            with contextlib.ExitStack() as held:
                while True:
                    try:
                        state = held.enter_context(self._file.changing())
                        break
                    except UnavailableError as error:
                        if not self._told_of_lock and self._clock.now() - begun >= WATCH_S:
                            self._told_of_lock = True
                            logger.error("what runs cannot be noted: %s", error)
                    await self._clock.sleep(LOOK_S)
                self._told_of_lock = False
                yield state

    async def _take(self, component: Component) -> Placement:
        async with self._changing() as state:
            return state.place(component, self._running)

    async def _replace(self, useless: Sequence[Placement], component: Component) -> Placement:
        """Takes a place where these have theirs. They are forgotten only now: until then people see them."""
        were_given_up = any(self._is_crash_looping(one.id) for one in useless)
        for placement in useless:
            await self._end(placement)
        await self._look()
        found = await self._take(component)
        if were_given_up:
            self._replacing.add(found.id)
        return found

    def _useless(self, component: Component) -> tuple[list[Placement], list[Placement]]:
        """The workers of this component that serve no more, by number, and those of others that share its
        GPUs."""
        state = self._file.read()
        own = [one for one in state.placements(component) if self._serves_no_more(one.id)]
        others = [
            placement
            for other in self._components
            if other.name != component.name and other.shares_devices and component.shares_devices
            for placement in state.placements(other)
            if self._serves_no_more(placement.id)
        ]
        return own, others

    def _enough_of(self, useless: Sequence[Placement], component: Component) -> Sequence[Placement]:
        """The first ones whose GPUs, with those that are free, do for a worker of this component; none where
        all of them would not."""
        for count in range(1, len(useless) + 1):
            state = self._file.read()
            for placement in useless[:count]:
                state.free(placement)
            with contextlib.suppress(ConfigError):
                state.place(component, self._running)
                return useless[:count]
        return []

    async def _is_given_up_again(self, placement: Placement) -> bool:
        """Where one was given up before, there is one again, by which a fleet without hope is known."""
        if placement.id in self._replacing:
            with contextlib.suppress(UnavailableError):
                running = (await self._supervisor.running()).get(placement.id)
                return running is not None and running.is_crash_looping
        return False

    async def _begin(self, placement: Placement, is_there: bool = False) -> None:
        if not is_there:
            await self._supervisor.start(placement)
        self._mine[placement.id] = placement
        if placement.spec is not None:
            await self._router.add(placement.spec)

    async def _until_ready(self, placement: Placement) -> None:
        deadline = self._clock.now() + self._start_timeout_s
        while self._router.state_of(placement.id) != WorkerState.READY:
            running = (await self._supervisor.running()).get(placement.id)
            if running is None or running.is_crash_looping:
                outcome = "given up again" if placement.id in self._replacing else "taken back"
                raise UnavailableError(
                    f"worker {placement.id} does not stay alive, and is {outcome}; its lines in the log say "
                    "why"
                )
            if self._clock.now() >= deadline:
                raise UnavailableError(
                    f"worker {placement.id} was not ready within {self._start_timeout_s:g} s (start_timeout) "
                    "and is taken back; its lines in the log say why"
                )
            await self._clock.sleep(LOOK_S)

    async def _until_gone(self, worker_id: str) -> None:
        deadline = self._clock.now() + GONE_S
        while self._router.state_of(worker_id) is not None:
            if self._clock.now() >= deadline:
                raise UnavailableError(
                    f"worker {worker_id} has ended, and the router names it {GONE_S:g} s later; does another "
                    "process have its id?"
                )
            await self._clock.sleep(LOOK_S)

    async def _end(self, placement: Placement) -> None:
        """Ours drain by themselves at SIGTERM, and what is left moves; another engine's may do neither. Where
        its supervisor does not answer, its place is free all the same, and the next look takes it again for
        what still runs there."""
        if placement.spec is not None:
            try:
                with contextlib.suppress(UnknownWorkerError):
                    await asyncio.wait_for(self._router.retire(placement.id), DRAIN_S)
            except TimeoutError:
                logger.warning("%s ends with requests that have not ended within %g s", placement.id, DRAIN_S)
        self._mine[placement.id] = placement
        try:
            await self._supervisor.stop(placement.id, GRACE_S)
            self._mine.pop(placement.id, None)
        finally:
            async with self._changing() as state:
                state.free(placement)
        if placement.spec is not None:
            with contextlib.suppress(UnknownWorkerError):  # a person has removed it
                await self._router.remove(placement.id)

    async def _watch(self) -> None:
        told = ""
        while True:
            await self._clock.sleep(WATCH_S)
            try:
                await self._look()
                told = ""
            except (UnavailableError, OSError) as error:  # a disk may be full for a while
                if told != str(error):
                    told = str(error)
                    logger.error("what runs cannot be noted in %s: %s", self._file.path, error)

    async def _look(self) -> None:
        """Brings the file up to date with what runs."""
        known = list(self._mine)  # not those that are begun during the call
        self._running = running = await self._supervisor.running()
        for name in known:
            if name not in running:
                self._mine.pop(name, None)
        async with self._changing() as state:
            if self._tasks:
                state.supervisor = ProcessId.of(os.getpid())
            for placement in self._mine.values():
                state.adopt(placement)
            state.see({name: one.pid for name, one in running.items()})
            self._note_missing(state)
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

    def _serves_no_more(self, worker_id: str) -> bool:
        """Whether it was given up, or has been missing for so long that `pending` does not wait for it."""
        since = self._missing_since.get(worker_id, math.inf)
        is_old = self._clock.now() - since >= self._start_timeout_s
        is_lost = is_old and self._is_missing(worker_id) and worker_id not in self._starting
        return is_lost or self._is_crash_looping(worker_id)

    def _is_crash_looping(self, worker_id: str) -> bool:
        running = self._running.get(worker_id)
        return running is not None and running.is_crash_looping
