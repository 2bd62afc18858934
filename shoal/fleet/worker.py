"""One worker as the router knows it: what it serves, how it fares, and the link to it.

A link speaks to a worker: `RemoteEngine` at token level to ours, `ExternalLink` by HTTP to any other. All
else that a router does with workers (choose, drain, probe, break the circuit) is the same for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.api import Span
from shoal.errors import BusyError, ShoalError, UnavailableError, UserError, WorkerFailedError
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet_views import WorkerState
from shoal.stats import Stats
from shoal.telemetry.served import ServedTotals

FAILURES_TO_BREAK = 3  # requests or checks that fail one after the other


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself, or what is said of it on the command line."""

    id: str
    url: str
    models: tuple[str, ...]  # the names that clients may use; (): not known yet
    adapters: frozenset[str] = frozenset()  # further names: adapters of the first model
    role: str = "both"
    is_external: bool = False  # it is spoken to by HTTP
    tags: frozenset[str] = frozenset()
    pid: int | None = None
    dp_size: int | None = 1  # data-parallel ranks; None: as many as its KV events name
    block_size: int = 16
    total_blocks: int = 0  # of all ranks
    kv_block_bytes: int = 0  # of one block, where workers exchange them
    lends_kv: bool = False  # others may read its KV blocks
    reads_kv: bool = False  # it reads those of others
    max_running: int = 0  # sequences that it runs at once; 0: unknown
    # What all workers of a model must have in common, such as {"weights": digest, "hash_seed": 1337}.
    identity: dict[str, Any] = {}
    details: dict[str, Any] = {}


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker publishes of its load, for one of its data-parallel ranks."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # the share of its KV cache that requests hold
    rank: int = 0


class Link(Protocol):
    """The way to one worker. What it sends to the worker ends at once when `Place.on_broken` is called."""

    async def check(self) -> WorkerInfo:
        """What the worker says of itself now. Returns soon if it answers at all. Raises WorkerFailedError."""
        ...

    async def canary(self) -> None:
        """Generates one token, to find a worker that answers and does not work. A worker that shows otherwise
        that it makes progress need not. Raises WorkerFailedError, and BusyError where it is full."""
        ...

    async def loads(self) -> list[WorkerLoad]:
        """The load of each rank, asked for now; [] where it cannot be asked for or comes by itself. Raises
        WorkerFailedError."""
        ...

    async def close(self) -> None: ...


L = TypeVar("L", bound=Link, covariant=True)


class Worker(Generic[L]):
    """`state` is READY only while requests may go there.

    A worker is BROKEN from its start until the first probe succeeds, and again when nobody is there, when it
    fails FAILURES_TO_BREAK times in succession, or when it hangs. Then it must generate a token for a probe
    before it is READY.
    """

    def __init__(self, info: WorkerInfo, link: L, clock: Callable[[], float]) -> None:
        self.info, self.link = info, link
        self.id = info.id
        self.ranks = [WorkerRank(info.id, rank) for rank in range(info.dp_size or 1)]
        self.knows_ranks = info.dp_size is not None  # until then its one rank is a guess
        self.has_events = False  # it tells what it caches
        self.is_draining = False
        self.num_holds = 0  # commands of an operator at work: it gets nothing until the last one has ended
        self.num_commands = 0  # of an operator that are at work: it may answer nothing else meanwhile
        self.sleep_level: int | None = None  # None: awake, 0: paused, 1 and 2: asleep
        self.is_paused = False  # also of one that sleeps, whose level is that of its sleep
        self.weights_version = 0
        self.stats: Stats | None = None  # as one of ours has reported last
        # What it has served, as it has reported last; of an external one, what this router has had of it.
        self.served: ServedTotals | None = ServedTotals.counting() if info.is_external else None
        self.loads: Sequence[WorkerLoad] = ()  # as it has published last, of each rank
        self.is_reached = False  # a probe has succeeded since it came, or since it broke
        self.is_gone = False
        self.why = "it was not reached yet"  # it gets nothing; "" while it is well
        self.excluded_reason = ""  # why it cannot serve with its peers, whatever its health
        self.needs_canary = False  # a check alone does not show that it is well again
        self.active = 0  # requests of this router that it has now
        # What this router has counted of it, and of those that had its id before.
        self.num_requests = 0
        self.num_prefills = 0  # prompts that it computed for another worker
        self.num_breaks = 0
        self.num_failed = 0  # requests that ended here with a WorkerFailedError
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.last_token_at = float("-inf")
        self.full_until = float("-inf")  # it has said that it is full
        self.broke = asyncio.Event()  # set while it is not reached
        self.suspected = asyncio.Event()  # set by a failure that may be its own, or the request's
        self.on_change: set[Callable[[], None]] = set()  # called when it may have got room, or was lost
        self.on_broken: set[Callable[[], None]] = set()  # those who wait for it: they are to wait no longer
        self.on_draining: set[Callable[[], None]] = set()  # those who may go on elsewhere
        self._clock = clock
        self._num_failures = 0

    @property
    def state(self) -> WorkerState:
        if self.is_gone:
            return WorkerState.GONE
        if not self.is_reached or self.excluded_reason:
            return WorkerState.BROKEN
        return WorkerState.DRAINING if self.is_draining or self.num_holds else WorkerState.READY

    @property
    def takes_requests(self) -> bool:
        """Whether it may be chosen: it is ready and awake. Each request asks all workers."""
        if self.is_draining or self.num_holds or self.excluded_reason or self.is_gone:
            return False
        return self.is_reached and self.sleep_level is None

    def has_room(self, num_active: int, now: float) -> bool:
        """Whether a request sent now would run soon, where it has so many."""
        return now >= self.full_until and not 0 < self.info.max_running <= num_active

    def changed(self) -> None:
        for tell in list(self.on_change):
            tell()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside of the block it gets nothing new. It is back behind it, so requests may wait for it."""
        self.num_holds += 1
        self.changed()
        try:
            yield
        finally:
            self.num_holds -= 1
            self.changed()

    def drain(self, is_draining: bool) -> None:
        """From now on it gets nothing new, or requests again."""
        self.is_draining = is_draining
        self.changed()
        if is_draining:
            for tell in list(self.on_draining):
                tell()

    async def wait_idle(self) -> None:
        """Returns when this router has no request there."""
        idle = asyncio.Event()

        def look() -> None:
            if not self.active:
                idle.set()

        self.on_change.add(look)
        try:
            look()
            await idle.wait()
        finally:
            self.on_change.discard(look)

    @property
    def is_asleep(self) -> bool:
        return self.sleep_level is not None

    def set_sleep_level(self, level: int | None) -> None:
        self.is_paused = level is not None and (level == 0 or self.is_paused)
        if self.sleep_level != level:
            self.sleep_level = level
            self.changed()

    def reached(self) -> None:
        """A probe succeeded."""
        self._num_failures = 0
        if not self.is_reached:
            self.is_reached, self.needs_canary, self.why = True, False, ""
            self.broke.clear()
            self.changed()

    def delivered(self) -> None:
        """It sent a token: whatever else is wrong, it works."""
        self.last_token_at, self._num_failures = self._clock(), 0

    def failed(self, error: WorkerFailedError) -> None:
        """A request or a check failed. Where nobody is there, one failure is enough."""
        self._num_failures += 1
        if error.is_absent or self._num_failures >= FAILURES_TO_BREAK:
            self._break(str(error))

    def forgive(self) -> None:
        """A failure was no fault of the worker's, as another one failed at the same request."""
        self._num_failures = max(0, self._num_failures - 1)

    def hangs(self, error: WorkerFailedError) -> None:
        """It takes requests and delivers nothing. Those who wait for it stop waiting."""
        self._break(str(error))
        self.interrupt()

    def interrupt(self) -> None:
        """Ends what it has now with a WorkerFailedError, so that it goes on elsewhere."""
        for tell in list(self.on_broken):
            tell()

    def _break(self, why: str) -> None:
        if self.is_reached:
            self.is_reached, self.needs_canary = False, True
            self.num_breaks += 1
            self.broke.set()
            self.changed()
        self.why = why


def at_worker(spans: list[Span] | None, worker_id: str) -> list[Span]:
    """What a worker tells of a request, as the fleet tells it on."""
    for span in spans or ():
        span.worker = worker_id
    return spans or []


class RefusedError(BusyError):
    """A worker lives, and takes nothing just now for another reason than that it is full."""


class MovedError(BusyError):
    """A request waited at a worker, and another worker would run it at once. The first one is not full for
    all that: it may be the better one for the next request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=0.0)


@contextlib.contextmanager
def errors_of(worker_id: str) -> Iterator[None]:
    """A worker's errors as the fleet knows them: after BusyError and WorkerFailedError another worker may go
    on."""
    try:
        yield
    except (UserError, BusyError, WorkerFailedError):
        raise
    except UnavailableError as error:  # it sleeps, say, and its report is on the way
        raise RefusedError(f"worker {worker_id}: {error}") from error
    except ShoalError as error:
        raise WorkerFailedError(f"worker {worker_id}: {error}") from error
