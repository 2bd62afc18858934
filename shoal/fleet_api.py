"""The interface between a server and a fleet. The server shows a fleet, operates it, and forwards requests to
external workers; neither imports the other. Torch-free."""

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
    """Results of a command for many workers. Each worker is in one of the first three fields."""

    results: dict[str, Any] = field(default_factory=dict)  # by worker
    errors: dict[str, ShoalError] = field(default_factory=dict)  # errors by worker
    not_asked: list[str] = field(default_factory=list)  # a rolling command ends at the first failure
    versions: dict[str, int] = field(
        default_factory=dict
    )  # version of the weights, if the command changes them


class FleetControl(Protocol):
    """The operations of the routes below /fleet. Raises RequestError and ConfigError for impossible ones,
    UnknownWorkerError for an unknown id."""

    def view(self) -> FleetView: ...

    def served(self) -> Mapping[str, ServedTotals]:
        """Returns the totals of each worker that reports them, by its id."""
        ...

    async def select(self, model: str | None, body: Mapping[str, Any]) -> Selected:
        """Returns the worker for a prompt, without generating. `body` has `token_ids`, `prompt` or
        `messages`, and may have `session`, `tags` and `cache_salt`. Raises UnavailableError if no worker
        accepts requests."""
        ...

    async def drain(self, worker_id: str) -> None:
        """Sends no new requests to the worker; its running requests continue."""
        ...

    async def resume(self, worker_id: str) -> None: ...

    async def change_role(self, worker_id: str, role: str) -> None:
        """Changes the role of a native worker, which reports it to all routers; its running requests
        continue. Raises ConfigError if it cannot."""
        ...

    async def change_workers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        """Adds external workers, in the form of --worker, and removes external workers by id: all of them, or
        none if one is invalid. Requests of a removed worker move to others. Returns the ids of the added
        ones."""
        ...

    async def configure(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Changes settings while running; returns all changeable settings."""
        ...

    def metrics(self) -> Iterable[Metric]:
        """Returns the router's metrics, in addition to its models' metrics."""
        ...

    async def command(
        self, command: Command[Any], worker_ids: Sequence[str] | None, *, model: str | None, rolling: bool
    ) -> CommandResults:
        """Runs a command on these workers (None: all, or all of the model): at the same time or, if
        `rolling`, one after another, each without requests meanwhile. Raises UnavailableError if there are no
        workers."""
        ...


def tags_of(headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Returns the tags that a worker must have, from a request's header X-Shoal-Tags: a,b."""
    given = headers.get(b"x-shoal-tags", b"").decode("latin-1")
    return tuple(tag for one in given.split(",") if (tag := one.strip()))


# External workers


@dataclass(slots=True)
class ExternalCall:
    """A client's request as received, and its timeline."""

    line: Timeline
    method: str
    path: str  # with the query
    headers: Mapping[bytes, bytes]  # by lower-case name
    body: bytes


@dataclass(slots=True)
class ExternalAnswer:
    """A worker's answer. `headers` are for the client, with X-Shoal-Worker."""

    status: int
    headers: list[tuple[bytes, bytes]]
    chunks: AsyncGenerator[bytes]
    content_type: bytes = field(default=b"application/json")


class Forwarder(Protocol):
    """Forwards the HTTP requests of a model with external workers."""

    async def forward(self, call: ExternalCall) -> ExternalAnswer:
        """Returns when the head of the answer, and for a stream its first token, have arrived. Closing
        `chunks` early (aclose) closes the connection to the worker. Both raise BusyError and
        UnavailableError; `chunks` does if a stream breaks and cannot be continued by another worker."""
        ...
