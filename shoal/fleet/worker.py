"""`Worker`: one worker as the router knows it, with its state, its counts and the link to it.

The link of a native worker is a `RemoteEngine` at token level; an external worker's is an `ExternalLink` over
HTTP. Choosing, draining, probing and circuit breaking are the same for both.
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

FAILURES_TO_BREAK = 3  # successive failures of requests or checks


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a worker: its own report, or its entry on the command line."""

    id: str
    url: str
    models: tuple[str, ...]  # the names for clients; () while unknown
    adapters: frozenset[str] = frozenset()  # further names: adapters of the first model
    role: str = "both"
    is_external: bool = False  # connected over HTTP
    tags: frozenset[str] = frozenset()
    pid: int | None = None
    dp_size: int | None = 1  # data-parallel ranks; None: learned from its KV events
    block_size: int = 16
    total_blocks: int = 0  # over all ranks
    kv_block_bytes: int = 0  # bytes per block, if workers exchange blocks
    state_bytes: int = 0  # bytes of the states that come with blocks; 0: there are no recurrent layers
    lends_kv: bool = False  # other workers can read its KV blocks
    reads_kv: bool = False  # it can read other workers' KV blocks
    max_running: int = 0  # concurrent sequences; 0: unknown
    # Facts in which all workers of a model must agree, such as {"weights": digest, "hash_seed": 1337}.
    identity: dict[str, Any] = {}
    details: dict[str, Any] = {}


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The published load of one data-parallel rank of a worker."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of its KV cache in use by requests
    rank: int = 0


class Link(Protocol):
    """The connection to one worker. A request there ends at once when `Assignment.on_broken` is called."""

    async def check(self) -> WorkerInfo:
        """Returns the worker's present facts, soon if it answers at all. Raises WorkerFailedError."""
        ...

    async def canary(self) -> None:
        """Generates one token, to find a worker that answers but does not work. Returns earlier if the worker
        shows progress otherwise. Raises WorkerFailedError, and BusyError if it is full."""
        ...

    async def loads(self) -> list[WorkerLoad]:
        """Requests the load of each rank; [] if the worker cannot be asked, or reports it by itself. Raises
        WorkerFailedError."""
        ...

    async def close(self) -> None: ...


L = TypeVar("L", bound=Link, covariant=True)


class Worker(Generic[L]):
    """`state` is READY only while the worker accepts requests.

    A worker is BROKEN from its start until the first probe succeeds, and again when it is not connected,
    fails FAILURES_TO_BREAK times in succession, or hangs. It must then generate a token for a probe before it
    is READY.
    """

    def __init__(self, info: WorkerInfo, link: L, clock: Callable[[], float]) -> None:
        self.info, self.link = info, link
        self.id = info.id
        self.ranks = [WorkerRank(info.id, rank) for rank in range(info.dp_size or 1)]
        self.knows_ranks = info.dp_size is not None  # False: its only rank is a guess
        self.has_events = False  # it publishes KV events
        self.is_draining = False
        self.num_holds = 0  # running commands that keep requests away
        self.num_commands = 0  # running commands, during which it may not answer
        self.sleep_level: int | None = None  # None: awake, 0: paused, 1 and 2: asleep
        self.is_paused = False  # stays True if a paused worker sleeps deeper
        self.weights_version = 0
        self.stats: Stats | None = None  # a native worker's last report
        # A native worker's last report; for an external one, this router's own counts.
        self.served: ServedTotals | None = ServedTotals.counting() if info.is_external else None
        self.loads: Sequence[WorkerLoad] = ()  # last published, by rank
        self.is_reached = False  # a probe has succeeded since it joined or broke
        self.is_gone = False
        self.why = "it was not reached yet"  # why it is BROKEN; "" while it is healthy
        self.excluded_reason = ""  # why it gets no requests though healthy, such as an incompatibility
        self.needs_canary = False  # a check alone does not prove its recovery
        self.active = 0  # its requests from this router
        # Counts of this router, including earlier workers of the same id.
        self.num_requests = 0
        self.num_prefills = 0  # prompts computed for other workers
        self.num_breaks = 0
        self.num_failed = 0  # requests that ended here with a WorkerFailedError
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.last_token_at = float("-inf")
        self.full_until = float("-inf")  # since it has refused a request as full
        self.broke = asyncio.Event()  # set while it is not reached
        self.suspected = asyncio.Event()  # set by a failure caused by it or by the request
        self.on_change: set[Callable[[], None]] = set()  # called when it may have room, or is lost
        self.on_broken: set[Callable[[], None]] = set()  # called to end the wait for it
        self.on_draining: set[Callable[[], None]] = set()  # called when it drains
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
        """True if it is ready and awake. Must be quick, as each request asks all workers."""
        if self.is_draining or self.num_holds or self.excluded_reason or self.is_gone:
            return False
        return self.is_reached and self.sleep_level is None

    def has_room(self, num_active: int, now: float) -> bool:
        """Returns whether a worker with `num_active` requests would run another one soon."""
        return now >= self.full_until and not 0 < self.info.max_running <= num_active

    def changed(self) -> None:
        for call in list(self.on_change):
            call()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps requests away during the block. It returns afterwards, so requests may wait for it."""
        self.num_holds += 1
        self.changed()
        try:
            yield
        finally:
            self.num_holds -= 1
            self.changed()

    def drain(self, is_draining: bool) -> None:
        """Stops new requests, or allows them again."""
        self.is_draining = is_draining
        self.changed()
        if is_draining:
            for call in list(self.on_draining):
                call()

    @property
    def is_idle(self) -> bool:
        """True if this router has no request there."""
        return not (self.active or self.on_broken or self.on_draining)

    async def wait_idle(self) -> None:
        """Returns once this router has no request there."""
        idle = asyncio.Event()

        def check() -> None:
            if not self.active:
                idle.set()

        self.on_change.add(check)
        try:
            check()
            await idle.wait()
        finally:
            self.on_change.discard(check)

    @property
    def is_asleep(self) -> bool:
        return self.sleep_level is not None

    def set_sleep_level(self, level: int | None) -> None:
        self.is_paused = level is not None and (level == 0 or self.is_paused)
        if self.sleep_level != level:
            self.sleep_level = level
            self.changed()

    def reached(self) -> None:
        """Records a successful probe."""
        self._num_failures = 0
        if not self.is_reached:
            self.is_reached, self.needs_canary, self.why = True, False, ""
            self.broke.clear()
            self.changed()

    def delivered(self) -> None:
        """Records a token, which proves that the worker works."""
        self.last_token_at, self._num_failures = self._clock(), 0

    def failed(self, error: WorkerFailedError) -> None:
        """Counts a failure. One is enough to break a worker that is not connected."""
        self._num_failures += 1
        if error.is_absent or self._num_failures >= FAILURES_TO_BREAK:
            self._break(str(error))

    def forgive(self) -> None:
        """Takes back a failure, as another worker failed at the same request."""
        self._num_failures = max(0, self._num_failures - 1)

    def hung(self, error: WorkerFailedError) -> None:
        """Breaks a worker that accepts requests and delivers nothing, and ends its requests."""
        self._break(str(error))
        self.interrupt()

    def interrupt(self) -> None:
        """Ends its requests with a WorkerFailedError, so that they continue at other workers."""
        for call in list(self.on_broken):
            call()

    def _break(self, why: str) -> None:
        if self.is_reached:
            self.is_reached, self.needs_canary = False, True
            self.num_breaks += 1
            self.broke.set()
            self.changed()
        self.why = why


def at_worker(spans: list[Span] | None, worker_id: str) -> list[Span]:
    """Returns a worker's spans of a request, marked with its id."""
    for span in spans or ():
        span.worker = worker_id
    return spans or []


class RefusedError(BusyError):
    """A live worker refuses a request for another reason than being full."""


class MovedError(BusyError):
    """A request leaves a worker where it waits for another that runs it at once. The first one does not count
    as full, since it may be the better one for the next request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=0.0)


@contextlib.contextmanager
def errors_of(worker_id: str) -> Iterator[None]:
    """Converts a worker's errors into errors of the fleet: after BusyError and WorkerFailedError another
    worker may continue."""
    try:
        yield
    except (UserError, BusyError, WorkerFailedError):
        raise
    except UnavailableError as error:  # for example it sleeps, and its report is on the way
        raise RefusedError(f"worker {worker_id}: {error}") from error
    except ShoalError as error:
        raise WorkerFailedError(f"worker {worker_id}: {error}") from error
