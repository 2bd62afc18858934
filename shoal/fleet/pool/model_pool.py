"""The workers of one model: their index, the choice among them, their queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.fleet.clock import Clock
from shoal.fleet.config import FleetConfig
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.native.disagg import PrefillPool
from shoal.fleet.native.kv_transfers import KvTransfers
from shoal.fleet.routing.dispatcher import NO_WORKER, Dispatcher, RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.fleet_views import Selected

NO_DECODE = "this model has prefill workers alone, and they generate nothing; start one with --role decode"


class TokenSource(Protocol):
    """Who tokenizes for a model whose workers are foreign."""

    async def tokens_of(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The token ids of a request's prompt, or of its first where it has several: `token_ids`, `prompt` or
        `messages` with what belongs to them. Numbers made of the text where nobody can tell. Raises
        RequestError for a body without any of these."""
        ...


class RequestSender(Protocol):
    """A FleetEngine, a ForeignForwarder."""

    num_migrations: int  # streams that went on at another worker
    num_retries: int  # requests without a token that were sent to another worker


class ModelPool:
    """`name`: the first name of the model. All its workers are ours, or all are foreign (`is_foreign`).
    `dispatcher` has those that generate, `prefills` those that compute prompts for them; a worker of the role
    `both` is in either if others may read its KV blocks."""

    def __init__(self, name: str, is_foreign: bool, config: FleetConfig, clock: Clock) -> None:
        self.name, self.is_foreign = name, is_foreign
        self.names: list[str] = [name]  # its own first, then adapters
        self.index = KvIndexer(config.block_size)
        self.router = KvRouter(
            self.index, policy=config.policy, weights=config.weights, seed=config.seed, clock=clock.now
        )
        self.dispatcher: Dispatcher[Any] = Dispatcher(
            self.router, max_queued=config.max_queued_requests, clock=clock
        )
        self.prefills = PrefillPool(self.router, config, clock)
        self.kv_transfers = KvTransfers(lambda: self.workers, self.router, enable_p2p=config.enable_p2p)
        self.tokens: TokenSource | None = None  # of foreign workers, for `Fleet.select`
        self._identity: dict[str, Any] = {}  # what all its workers have in common
        self.sender: RequestSender | None = None  # what sends requests to the workers
        self.blocked_reason = ""  # why its workers get nothing, whatever their health
        self.empty_since: float | None = None  # seconds of the clock; None while it has a worker

    def add(self, worker: Worker[Any]) -> None:
        """A worker that fits."""
        self._identity = {**worker.info.identity, **self._identity}
        self.empty_since = None
        self.assign(worker)

    def assign(self, worker: Worker[Any]) -> None:
        """Has the worker do what its role says, in place of what it did. What it has goes on."""
        role, prefills = worker.info.role, self.prefills.dispatcher
        computes = role == "prefill" or (role == "both" and worker.info.lends_kv)
        for dispatcher, takes_it in ((self.dispatcher, role != "prefill"), (prefills, computes)):
            if not takes_it:
                dispatcher.dismiss(worker.id)
            elif worker.id not in dispatcher.workers:
                dispatcher.add(worker)
        self._explain()

    def remove(self, worker_id: str) -> None:
        """The worker serves this model no more."""
        for dispatcher in (self.dispatcher, self.prefills.dispatcher):
            if worker_id in dispatcher.workers:
                dispatcher.remove(worker_id)
        self._explain()

    @property
    def workers(self) -> dict[str, Worker[Any]]:
        """All of them, by id."""
        return self.dispatcher.workers | self.prefills.dispatcher.workers

    def changed(self) -> None:
        """Some of the workers may have got room."""
        self.dispatcher.changed()
        self.prefills.dispatcher.changed()

    def _explain(self) -> None:
        """Says what is missing, for requests that find no worker."""
        is_prefill_alone = self.prefills.dispatcher.workers and not self.dispatcher.workers
        self.dispatcher.unavailable_reason = NO_DECODE if is_prefill_alone else NO_WORKER

    def block(self, why: str) -> None:
        """Its workers are not ready because of this; "": nothing is in their way."""
        self.blocked_reason = why
        for worker in self.workers.values():
            worker.excluded_reason = why
        self.changed()

    def configure(self, setting: str, value: Any) -> None:
        """One of `shoal.fleet.pool.fleet.SETTINGS`."""
        if setting == "max_local_prefill_length":
            self.prefills.max_local_prefill_length = value
        elif setting == "max_prefill_queue_size":
            self.prefills.dispatcher.max_queued = value
        elif setting == "max_queued_requests":
            self.dispatcher.max_queued = value
        else:
            setattr(self.dispatcher, setting, value)
        self.changed()

    def current_names(self) -> list[str]:
        """The names that its workers offer; those that they offered while there is none."""
        workers = [worker.info for worker in self.workers.values()]
        own = {name for info in workers if not info.is_foreign for name in info.models}
        adapters = {name for info in workers if info.models[0] == self.name for name in info.adapters}
        if workers:
            self.names = [self.name, *sorted((own | adapters) - {self.name})]
        return self.names

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request for this name means; None for the model itself."""
        workers = self.dispatcher.workers.values()
        return name if any(name in worker.info.adapters for worker in workers) else None

    def incompatibility(self, info: WorkerInfo, names: Sequence[str]) -> str:
        """Why a worker cannot serve its model of these names as those do that are here, or were here last; ""
        if it can."""
        if info.is_foreign != self.is_foreign:
            return "its other workers are " + ("foreign" if self.is_foreign else "ours") + ", and it is not"
        if info.is_foreign and self.name not in names:
            return f"{self.name!r} has an adapter of this name"
        for key, value in self._identity.items():
            if info.identity.get(key, value) != value:
                return f"its {key} is {info.identity[key]!r:.80}, and that of the others is {value!r:.80}"
        return ""

    async def select(self, request: RoutingRequest) -> Selected:
        """Where the request would go now, full or not. Raises UnavailableError."""
        ranks = [rank for worker in self.dispatcher.ready_for(request) for rank in worker.ranks]
        chains = await self.dispatcher.chains_of(request)
        choice = self.router.schedule_chains(
            len(request.token_ids), chains, session=request.session, among=ranks
        )
        costs: dict[str, float] = {}
        for rank, cost in choice.costs.items():
            costs[rank.worker] = min(cost, costs.get(rank.worker, cost))
        return Selected(choice.rank.worker, choice.overlap.total, costs)
