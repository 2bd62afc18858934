"""`ModelPool`: the workers of one model with their KvIndexer, KvRouter, Dispatcher and prefill workers.
fleet.py adds and removes workers; `sender` (FleetEngine or ExternalForwarder) sends the requests."""

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

NO_DECODE = "this model has prefill workers only, which do not generate; start one with --role decode"


class TokenSource(Protocol):
    """The tokenizer of a model with external workers."""

    async def tokens_of(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Returns the token ids of a request's prompt, or of its first one. The body has `token_ids`,
        `prompt` or `messages`; hashes of the text stand in for unknown tokens. Raises RequestError for a body
        without any of these."""
        ...


class RequestSender(Protocol):
    """The part that sends requests to workers: a FleetEngine or an ExternalForwarder."""

    num_migrations: int  # streams that continued at another worker
    num_retries: int  # requests without a token that were sent to another worker


class ModelPool:
    """One model of a router. `name`: its first name. Its workers are all native, or all external
    (`is_external`). `dispatcher` has the workers that generate, `prefills` the workers that compute
    prompts for them; a worker of the role `both` is in both if others may read its KV blocks."""

    def __init__(self, name: str, is_external: bool, config: FleetConfig, clock: Clock) -> None:
        self.name, self.is_external = name, is_external
        self.names: list[str] = [name]  # its own name first, then adapters
        self.index = KvIndexer(config.block_size)
        self.router = KvRouter(
            self.index, policy=config.policy, weights=config.weights, seed=config.seed, clock=clock.now
        )
        self.dispatcher: Dispatcher[Any] = Dispatcher(
            self.router, max_queued=config.max_queued_requests, clock=clock
        )
        self.prefills = PrefillPool(self.router, config, clock)
        self.kv_transfers = KvTransfers(lambda: self.workers, self.router, enable_p2p=config.enable_p2p)
        self.tokens: TokenSource | None = None  # for `Fleet.select` with external workers
        self._identity: dict[str, Any] = {}  # the facts in which all its workers agree
        self.sender: RequestSender | None = None
        self.blocked_reason = ""  # why no worker gets requests; "" if nothing blocks them
        self.empty_since: float | None = None  # seconds of the clock; None while it has a worker

    def add(self, worker: Worker[Any]) -> None:
        """Adds a compatible worker."""
        self._identity = {**worker.info.identity, **self._identity}
        self.empty_since = None
        self.assign(worker)

    def assign(self, worker: Worker[Any]) -> None:
        """Puts the worker where its role belongs, and takes it from elsewhere. Its requests continue."""
        role, prefills = worker.info.role, self.prefills.dispatcher
        computes = role == "prefill" or (role == "both" and worker.info.lends_kv)
        for dispatcher, takes_it in ((self.dispatcher, role != "prefill"), (prefills, computes)):
            if not takes_it:
                dispatcher.dismiss(worker.id)
            elif worker.id not in dispatcher.workers:
                dispatcher.add(worker)
        self._explain()

    def remove(self, worker_id: str) -> None:
        """Removes a worker that no longer serves this model."""
        for dispatcher in (self.dispatcher, self.prefills.dispatcher):
            if worker_id in dispatcher.workers:
                dispatcher.remove(worker_id)
        self._explain()

    @property
    def workers(self) -> dict[str, Worker[Any]]:
        """All workers, by id."""
        return self.dispatcher.workers | self.prefills.dispatcher.workers

    def changed(self) -> None:
        """Assigns waiting requests, as some workers may have room now."""
        self.dispatcher.changed()
        self.prefills.dispatcher.changed()

    def _explain(self) -> None:
        """Sets the error text for requests that find no worker."""
        is_prefill_alone = self.prefills.dispatcher.workers and not self.dispatcher.workers
        self.dispatcher.unavailable_reason = NO_DECODE if is_prefill_alone else NO_WORKER

    def block(self, why: str) -> None:
        """Excludes all workers for this reason; "" includes them again."""
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
        """Returns the names that its workers offer; without workers, the names offered last."""
        workers = [worker.info for worker in self.workers.values()]
        own = {name for info in workers if not info.is_external for name in info.models}
        adapters = {name for info in workers if info.models[0] == self.name for name in info.adapters}
        if workers:
            self.names = [self.name, *sorted((own | adapters) - {self.name})]
        return self.names

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the adapter of this name; None for the model itself."""
        workers = self.dispatcher.workers.values()
        return name if any(name in worker.info.adapters for worker in workers) else None

    def incompatibility(self, info: WorkerInfo, names: Sequence[str]) -> str:
        """Returns why a worker of a model of these names cannot serve with the present or last workers of
        this one; "" if it can."""
        if info.is_external != self.is_external:
            return (
                "its other workers are " + ("external" if self.is_external else "native") + ", and it is not"
            )
        if info.is_external and self.name not in names:
            return f"{self.name!r} has an adapter of this name"
        for key, value in self._identity.items():
            if info.identity.get(key, value) != value:
                return f"its {key} is {info.identity[key]!r:.80}, and the others have {value!r:.80}"
        return ""

    async def select(self, request: RoutingRequest) -> Selected:
        """Returns the worker that the request would go to now, full or not. Raises UnavailableError."""
        ranks = [rank for worker in self.dispatcher.ready_for(request) for rank in worker.ranks]
        chains = await self.dispatcher.chains_of(request)
        choice = self.router.schedule_chains(
            len(request.token_ids), chains, session=request.session, among=ranks
        )
        costs: dict[str, float] = {}
        for rank, cost in choice.costs.items():
            costs[rank.worker] = min(cost, costs.get(rank.worker, cost))
        return Selected(choice.rank.worker, choice.overlap.total, costs)
