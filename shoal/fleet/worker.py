"""One worker as the router knows it: what it serves, how it fares, and the link to it.

A link speaks to a worker: `RemoteEngine` at token level to ours, `ForeignLink` by HTTP to any other. All
else that a router does with workers (choose, drain, probe, break the circuit) is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.errors import WorkerFailedError
from shoal.fleet.indexer import WorkerRank
from shoal.fleet_api import WorkerState

FAILURES_TO_BREAK = 3  # requests that fail one after the other


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself, or what is said of it on the command line."""

    id: str
    url: str
    models: tuple[str, ...]  # the names that clients may use; the first is the one answered with
    role: str = "both"
    tags: frozenset[str] = frozenset()
    pid: int | None = None
    dp_size: int = 1  # data-parallel ranks
    block_size: int = 16
    total_blocks: int = 0
    max_running: int = 0  # sequences that it runs at once; 0: unknown
    details: dict[str, Any] = {}


class Link(Protocol):
    """The way to one worker."""

    async def check(self) -> None:
        """Returns soon if the worker answers at all. Raises WorkerFailedError."""
        ...

    async def canary(self) -> None:
        """Generates one token, to find a worker that answers and does not work. Raises WorkerFailedError."""
        ...

    async def close(self) -> None: ...


L = TypeVar("L", bound=Link, covariant=True)


class Worker(Generic[L]):
    """`state` is READY only while requests may go there. A worker that fails FAILURES_TO_BREAK times in
    succession, or whose connection is refused, is BROKEN until a probe succeeds."""

    def __init__(self, info: WorkerInfo, link: L, clock: Callable[[], float]) -> None:
        self.info, self.link = info, link
        self.is_draining = False
        self.is_reached = False  # a probe has succeeded since it came, or since it broke
        self.is_gone = False
        self.active = 0  # requests of this router that it has now
        self.num_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.last_token_at = float("-inf")
        self.full_until = float("-inf")  # it has said that it is full
        self._clock = clock
        self._num_failures = 0

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def ranks(self) -> list[WorkerRank]:
        return [WorkerRank(self.id, rank) for rank in range(self.info.dp_size)]

    @property
    def state(self) -> WorkerState:
        if self.is_gone:
            return WorkerState.GONE
        if not self.is_reached:
            return WorkerState.BROKEN
        return WorkerState.DRAINING if self.is_draining else WorkerState.READY

    @property
    def has_room(self) -> bool:
        """Whether a request sent now would run soon, as far as this router knows."""
        is_full = self.info.max_running > 0 and self.active >= self.info.max_running
        return not is_full and self._clock() >= self.full_until

    def reached(self) -> None:
        """A probe succeeded."""
        self.is_reached, self._num_failures = True, 0

    def delivered(self) -> None:
        """It sent a token: whatever else is wrong, it works."""
        self.last_token_at, self._num_failures = self._clock(), 0

    def failed(self, error: WorkerFailedError, *, at_once: bool = False) -> None:
        """A request or a probe failed. `at_once`: nobody is there, so that one failure is enough."""
        self._num_failures += 1
        if at_once or self._num_failures >= FAILURES_TO_BREAK:
            self.is_reached = False
