"""A connector starts and ends a fleet's workers, wherever they run: `shoal fleet up` and the planner use it.

One file for each kind, `connector_*.py`; connectors.py chooses. All keep one contract
(tests/process/test_connectors.py).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet_views import WorkerState

LOOK_S = 0.1  # between two looks at a worker that comes or goes
GRACE_S = 60.0  # for a worker to end what it has, after SIGTERM


@dataclass(frozen=True, slots=True)
class Component:
    """A kind of worker, of which there may be any number.

    command: the words of the command line. In each of them `{id}` stands for the worker's id and
    `{port}`, `{events_port}` and `{replay_port}` for free ports, which a worker keeps when it starts
    again. model: what clients call it. source: what its workers load, where they are ours. count: how
    many there are at first. worker: how the router reaches one that speaks HTTP, in the form of --worker;
    None: it joins by itself. devices: the GPUs of all its workers, of which each gets
    `devices_per_worker`; without them workers see what this process sees. shares_devices: the GPUs are
    those of other components too, and one worker has each at a time. resources: what Ray reserves for one
    worker, on one node. death_signal: what a worker gets when the process that started it is killed."""

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
    """How many changes are being made at this moment."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Inside of the block."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


def component_of(components: Sequence[Component], model: str, role: str) -> Component:
    """Raises ConfigError if there is none."""
    for component in components:
        if (component.model, component.role) == (model, role):
            return component
    raise ConfigError(f"no [[workers]] of {model} has the role {role!r}; write one, with count = 0")


def is_missing(state: WorkerState | None) -> bool:
    """Whether a worker with this state (None: it is not known) should be ready and is not. One that drains is
    as somebody wanted it."""
    return state in (None, WorkerState.BROKEN, WorkerState.GONE)


class RouterView(Protocol):
    """What a connector asks of the router: whether a worker is there."""

    def state_of(self, worker_id: str) -> WorkerState | None:
        """None: the router knows no worker of this id."""
        ...

    def role_of(self, worker_id: str) -> str | None:
        """The role that it has now, which may have changed since its start. None as above."""
        ...

    def ready(self, model: str, role: str) -> list[str]:
        """The ids of all workers that are ready, whoever started them."""
        ...

    async def add(self, spec: str) -> str:
        """Adds a worker that speaks HTTP, in the form of --worker. Returns its id."""
        ...

    async def retire(self, worker_id: str) -> None:
        """Has such a worker end what it does, and sends it nothing new. Raises UnknownWorkerError."""
        ...

    async def remove(self, worker_id: str) -> None:
        """Forgets such a worker. Raises UnknownWorkerError."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What every connector is made of. `start_timeout_s`: how long a new worker may take to be ready. `log`:
    where the workers' lines go, if this process reads them. `folder`: for what a connector must find again
    when it starts anew."""

    components: Sequence[Component]
    router: RouterView
    clock: Clock
    start_timeout_s: float
    log: ProcessLog
    folder: Path


class Connector(Protocol):
    """Starts and ends workers. A worker that dies is started again, after a delay that grows. Workers of one
    model may come and go while those of another do."""

    async def start(self) -> None:
        """Starts as many workers of each component as it counts, or takes over what a crash has left. It does
        not wait until they are ready. Called once, before all else. Raises ConfigError for what cannot be,
        such as too few GPUs."""
        ...

    def pending(self, model: str) -> int:
        """Workers of the model that should be ready and are not: they start, start again, or end. Those that
        are drained by a person, that are given up, or that have not been ready for `start_timeout_s` do not
        count: they would keep the planner from deciding."""
        ...

    async def add(self, model: str, role: str) -> str:
        """Starts one more worker, and returns its id when it is ready. Raises UnavailableError if it is not
        in time, with everything taken back (a worker in the place of one that was given up may be given up
        in its turn); ConfigError if there is no such component, or no GPU for it."""
        ...

    async def remove(self, model: str, role: str) -> str:
        """Ends one worker that has this role now, and returns its id when it has drained and is gone. One of
        another component, which has changed its role, goes first. Raises UnavailableError if no worker of
        this role was started here, and ConfigError as `add` does."""
        ...

    async def wait_until_all_failed(self) -> None:
        """Returns when there were workers and none of them will be started again: never, where whoever starts
        them does not give up."""
        ...

    async def close(self, grace_s: float) -> None:
        """Ends what was started here, unless it belongs to a system that goes on without the fleet. Workers
        have `grace_s` seconds to end what they do; then they are killed. It may be called again, with less,
        while it runs."""
        ...
