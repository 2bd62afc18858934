"""What a server and a fleet are to each other. The server shows a fleet, operates it, and passes requests on
to workers that speak HTTP themselves; neither imports the other. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from prometheus_client.core import Metric

from shoal.control import Command
from shoal.errors import ShoalError


class WorkerState(enum.StrEnum):
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, and gets nothing new
    BROKEN = "broken"  # not reached yet, or failing; probes find out when it is well
    GONE = "gone"  # its lease has ended, or it was removed


class WorkerView(msgspec.Struct, kw_only=True):
    """One worker, as `GET /fleet` shows it. Blocks are of the worker's own size."""

    id: str
    url: str
    role: str  # "both", "prefill", "decode"
    model: str
    state: WorkerState
    why: str = ""  # it gets nothing, where that is not plain
    pid: int | None = None  # of a worker on this host
    tags: list[str] = []
    active_requests: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    requests: int = 0  # that it was sent, since the router's start
    hit_rate: float = 0.0  # the share of prompt tokens that it had cached
    asleep: bool = False
    weights_version: int = 0
    prefills_done: int = 0  # prompts that it computed for other workers, since the router's start
    # KV blocks, since the worker's start:
    blocks_in: int = 0  # read from other workers
    blocks_out: int = 0  # that others have read here
    transfer_GB_s: float = 0.0  # of what it read, in 10^9 bytes a second; 0: nothing yet


class QueueView(msgspec.Struct):
    """Requests that wait for a worker."""

    length: int = 0
    oldest_s: float = 0.0


class PlannerView(msgspec.Struct):
    mode: str
    last_decision: str  # its reason
    desired: dict[str, int]  # workers by role
    changing: bool  # whether workers are being added or removed


class FleetView(msgspec.Struct, omit_defaults=True):
    policy: str
    workers: list[WorkerView]
    queue: QueueView
    prefill_queue: QueueView  # prompts that wait for a prefill worker
    planner: PlannerView | None = None  # where there is one


class Selected(msgspec.Struct):
    """Which worker a prompt would go to. Costs are by worker, lower is better."""

    worker: str
    overlap_blocks: int
    costs: dict[str, float]


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

    async def select(self, model: str | None, body: Mapping[str, Any]) -> Selected:
        """`body` has `token_ids`, `prompt` or `messages`, and may have `session`, `tags` and `cache_salt`. No
        worker is asked to generate. Raises UnavailableError where no worker can take it."""
        ...

    async def drain(self, worker_id: str) -> None:
        """The worker gets nothing new from now on; what it has runs on."""
        ...

    async def resume(self, worker_id: str) -> None: ...

    async def add(self, spec: str) -> str:
        """Adds a foreign worker, in the form of --worker. Returns its id."""
        ...

    async def remove(self, worker_id: str) -> None:
        """Requests that it has move to others."""
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


# Workers that speak HTTP themselves


@dataclass(slots=True)
class ForeignCall:
    """A client's request as it came."""

    request_id: str
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
