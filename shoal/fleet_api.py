"""What a server and a fleet are to each other. The server shows a fleet, operates it, and passes requests on
to workers that speak HTTP themselves; neither imports the other. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.core import Metric

from shoal.control import Command
from shoal.errors import ShoalError
from shoal.fleet_views import FleetView, Selected
from shoal.telemetry.served import ServedTotals
from shoal.telemetry.timeline import Timeline


@dataclass(slots=True)
class CommandResults:
    """What became of a verb for many workers. Each is in one of the first three."""

    results: dict[str, Any] = field(default_factory=dict)  # by worker
    errors: dict[str, ShoalError] = field(default_factory=dict)  # by worker that failed
    not_asked: list[str] = field(default_factory=list)  # a rolling one ends at the first failure
    versions: dict[str, int] = field(default_factory=dict)  # of the weights, where the verb changes them


class FleetControl(Protocol):
    """What the routes below /fleet ask. Raises RequestError and ConfigError for what cannot be done,
    UnknownWorkerError for an id that no worker has."""

    def view(self) -> FleetView: ...

    def served(self) -> Mapping[str, ServedTotals]:
        """What each worker has served, by its id; those that have not told it are left out."""
        ...

    async def select(self, model: str | None, body: Mapping[str, Any]) -> Selected:
        """`body` has `token_ids`, `prompt` or `messages`, and may have `session`, `tags` and `cache_salt`. No
        worker is asked to generate. Raises UnavailableError where no worker can take it."""
        ...

    async def drain(self, worker_id: str) -> None:
        """The worker gets nothing new from now on; what it has runs on."""
        ...

    async def resume(self, worker_id: str) -> None: ...

    async def change_role(self, worker_id: str, role: str) -> None:
        """One of our workers does another role from now on, as all routers hear from it; what it has goes on.
        Raises ConfigError if it cannot."""
        ...

    async def change_workers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        """Adds foreign workers, in the form of --worker, and removes foreign workers by id: all of it, or
        nothing where one of them is wrong. Requests that a removed one has move to others. Returns the ids of
        those that were added."""
        ...

    async def configure(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Changes settings while running; returns all that can be changed, as they are now."""
        ...

    def metrics(self) -> Iterable[Metric]:
        """What Prometheus reads of the router, beside its models."""
        ...

    async def command(
        self, command: Command[Any], worker_ids: Sequence[str] | None, *, model: str | None, rolling: bool
    ) -> CommandResults:
        """One verb for these workers (None: all, or all of the model): at the same time or, `rolling`, one
        after the other, each without requests meanwhile. Raises UnavailableError if there are none."""
        ...


def tags_of(headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """The tags that a worker must have by a request's header X-Shoal-Tags: a,b."""
    given = headers.get(b"x-shoal-tags", b"").decode("latin-1")
    return tuple(tag for one in given.split(",") if (tag := one.strip()))


# Workers that speak HTTP themselves


@dataclass(slots=True)
class ForeignCall:
    """A client's request as it came, and where is written what happens to it."""

    line: Timeline
    method: str
    path: str  # with the URL's query
    headers: Mapping[bytes, bytes]  # by lower-case name
    body: bytes


@dataclass(slots=True)
class ForeignAnswer:
    """A worker's answer. `headers` are those that the client gets, with X-Shoal-Worker."""

    status: int
    headers: list[tuple[bytes, bytes]]
    chunks: AsyncGenerator[bytes]
    content_type: bytes = field(default=b"application/json")


class Forwarder(Protocol):
    """A model whose workers are foreign: requests go on at HTTP level."""

    async def forward(self, call: ForeignCall) -> ForeignAnswer:
        """Returns when the answer begins: its head, and for a stream its first token, are there. Whoever
        leaves `chunks` early (aclose) leaves the worker too. Both raise BusyError and UnavailableError: from
        `chunks` they come where a stream breaks and cannot be taken up elsewhere."""
        ...
