"""`Connector`: the protocol that starts and ends a fleet's workers, for `shoal fleet up` and the planner.
Each kind has a file here; by_name.py chooses one.

All kinds fulfil one contract (tests/process/test_connectors.py).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet_views import WorkerState

LOOK_S = 0.1  # between two polls of a worker that starts or ends
GRACE_S = 60.0  # for a worker to finish its requests after SIGTERM

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Component:
    """A kind of worker. A fleet may run any number of them.

    command: words of the command line. `{id}` stands for the worker's id, and `{port}`, `{events_port}` and
    `{replay_port}` for free ports, which a worker keeps when it restarts. model: its name for clients.
    source: the model that native workers load. count: number of workers at the start. worker: the address of
    an external worker, in the form of --worker; None: the worker joins by itself. devices: the GPUs of all
    its workers, `devices_per_worker` for each; empty: workers see the GPUs of this process.
    shares_devices: other components use the same GPUs, each by one worker at a time. resources: Ray's
    reservation for one worker, on one node. death_signal: sent to a worker when the process that started it
    is killed."""

    name: str
    command: tuple[str, ...]
    model: str = ""
    source: str = ""
    role: str = "both"
    count: int = 1
    worker: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    devices_per_worker: int = 1
    shares_devices: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    death_signal: signal.Signals = signal.SIGKILL


class InFlight:
    """Counts the changes in flight."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts one more until the block is left."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


async def poll_until(clock: Clock, condition: Callable[[], T], timeout_s: float) -> T:
    """Returns the condition's value as soon as it is true; the last, false one after `timeout_s` seconds."""
    deadline = clock.now() + timeout_s
    while not (value := condition()) and clock.now() < deadline:
        await clock.sleep(LOOK_S)
    return value


def component_of(components: Sequence[Component], model: str, role: str) -> Component:
    """Returns the component of this model and role. Raises ConfigError if the fleet has none."""
    for component in components:
        if (component.model, component.role) == (model, role):
            return component
    raise ConfigError(f"[[workers]] of {model} must include the role {role!r}; add an entry with count = 0")


def is_missing(state: WorkerState | None) -> bool:
    """Returns True if a worker with this state (None: unknown to the router) should be ready and is not. A
    draining worker is not missing: someone requested that."""
    return state in (None, WorkerState.BROKEN, WorkerState.GONE)


class RouterView(Protocol):
    """The router as connectors see it: states of workers, and external workers to add and remove."""

    def state_of(self, worker_id: str) -> WorkerState | None:
        """Returns None if the router does not know the worker."""
        ...

    def role_of(self, worker_id: str) -> str | None:
        """Returns the present role, which may have changed since the start; None as above."""
        ...

    def ready(self, model: str, role: str) -> list[str]:
        """Returns the ids of all ready workers, also of workers that others started."""
        ...

    async def add(self, spec: str) -> str:
        """Adds an external worker, in the form of --worker. Returns its id."""
        ...

    async def retire(self, worker_id: str) -> None:
        """Sends an external worker no new requests and waits for its present ones. Raises
        UnknownWorkerError."""
        ...

    async def remove(self, worker_id: str) -> None:
        """Removes an external worker. Raises UnknownWorkerError."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The arguments of every connector. `start_timeout_s`: limit for a new worker to become ready. `log`: for
    the workers' output, if this process reads it. `folder`: for state that a restarted connector needs."""

    components: Sequence[Component]
    router: RouterView
    clock: Clock
    start_timeout_s: float
    log: ProcessLog
    folder: Path


class Connector(Protocol):
    """Starts and ends workers, and restarts a worker that dies, after a growing delay. Changes of different
    models may overlap."""

    async def start(self) -> None:
        """Starts `count` workers of each component, or takes over the workers that a crash has left. Does not
        wait until they are ready. Called once, before the other methods. Raises ConfigError, for example for
        too few GPUs."""
        ...

    def pending(self, model: str) -> int:
        """Returns the number of workers of the model that should be ready and are not: they start, restart or
        end. Workers that a person drains, that crash-loop, or that have been missing for `start_timeout_s` do
        not count: they would keep the planner from deciding."""
        ...

    async def add(self, model: str, role: str) -> str:
        """Starts one more worker and returns its id when it is ready. Raises UnavailableError if it is not
        ready in time, and removes it again (the replacement of a crash-looping worker may stay as
        crash-looping); ConfigError if the fleet has no such component, or no GPU for it."""
        ...

    async def remove(self, model: str, role: str) -> str:
        """Ends one worker that has this role now and returns its id when it has drained and left. A worker of
        another component, which has changed its role, ends first. Raises UnavailableError if no worker with
        this role was started here, and ConfigError as `add` does."""
        ...

    async def wait_until_all_failed(self) -> None:
        """Returns when all workers crash-loop. Never returns for a connector whose system restarts workers
        for ever."""
        ...

    async def close(self, grace_s: float) -> None:
        """Ends the workers that were started here, unless they belong to a system that continues without the
        fleet. Kills a worker after `grace_s` seconds. May be called again with a shorter grace while it
        runs."""
        ...
