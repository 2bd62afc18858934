"""`Fleet`: all workers of one router, by model: joining, leaving, KV event feeds, and the operator's view.
Queue and choice are in each model's model_pool.py, probes in health.py; native/membership.py reports who
joins."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq.asyncio
from prometheus_client.core import Metric

from shoal.control import Command, UpdateWeights, WakeUp
from shoal.errors import ConfigError, RequestError, ShoalError, UnavailableError, UnknownWorkerError
from shoal.fleet.clock import Clock
from shoal.fleet.config import FleetConfig
from shoal.fleet.index.event_feed import EventFeed
from shoal.fleet.index.event_listener import listen
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.pool import metrics as fleet_metrics
from shoal.fleet.pool.commands import command_workers
from shoal.fleet.pool.health import HealthChecks
from shoal.fleet.pool.metrics import planner_metrics
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.pool.replica_sync import ReplicaSync
from shoal.fleet.registry.registry import Registry
from shoal.fleet.routing.dispatcher import RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Link, Worker, WorkerInfo, WorkerLoad
from shoal.fleet.worker_spec import WorkerSpec, check_distinct, parse_worker
from shoal.fleet_api import CommandResults
from shoal.fleet_views import FleetView, PlannerView, QueueView, Selected, TierView, WorkerState, WorkerView
from shoal.kv_events import BlockStored, KVEvent
from shoal.tasks import start, stop
from shoal.telemetry.served import ServedTotals

logger = logging.getLogger(__name__)

TICK_S = 1.0  # between two rounds of maintenance
WAKE_AGAIN_S = 10.0  # between two tries to wake a worker
MODEL_MEMORY_S = 600.0  # a model without workers stays known this long: requests may be retried
# Options that may change while running.
SETTINGS = (
    "max_queued_requests",
    "busy_kv_usage",
    "busy_prefill_tokens",
    "max_local_prefill_length",
    "max_prefill_queue_size",
)

# Counts that a worker keeps when it joins again under its id, so that one that breaks at every start shows.
COUNTS = ("num_requests", "num_prefills", "num_breaks", "num_failed")
MAX_GONE = 256  # workers that left and whose counts are kept

# Feeds one rank's events to an EventFeed, until it is cancelled.
Listening = Callable[[EventFeed], Coroutine[Any, Any, None]]


class Fleet:
    """The workers of one router and its models. `changed` is set when a model appeared or disappeared. Not
    thread-safe."""

    def __init__(
        self,
        config: FleetConfig,
        clock: Clock,
        registry: Registry | None = None,
        connect: Callable[[WorkerSpec], Link] | None = None,
    ) -> None:
        """`connect` makes the link to an external worker."""
        self.config, self.clock, self.registry = config, clock, registry
        self.models: dict[str, ModelPool] = {}  # by each of their names
        self._all: list[ModelPool] = []
        self.workers: dict[str, Worker[Any]] = {}
        self.changed = asyncio.Event()
        self.planner_view: Callable[[], PlannerView] | None = None  # set by a planner, if one runs
        self.parked_ids: Callable[[], Container[str]] = tuple  # workers that the planner put to sleep
        self.health_checks = HealthChecks(
            clock,
            interval_s=config.check_interval,
            hang_timeout_s=config.hang_timeout,
            checked=self._checked,
            loaded=lambda worker, loads: self.published(worker.id, loads),
        )
        self.replica_sync = None if registry is None else ReplicaSync(registry, lambda: self._all)
        self._connect = connect
        self._settings: dict[str, Any] = {name: getattr(config, name) for name in SETTINGS}
        self._listening: dict[str, Sequence[Listening]] = {}  # by worker, one for each rank
        self._feeds: dict[str, list[tuple[EventFeed, asyncio.Task[None]]]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._waking: dict[str, asyncio.Task[None]] = {}  # by worker
        self._no_wake_before: dict[str, float] = {}  # by worker
        self._counts: dict[str, list[int]] = {}  # COUNTS of workers that left, the oldest first

    async def start(self) -> None:
        """Starts with the external workers of the configuration."""
        self._tasks.append(start(self._maintain()))
        if self.replica_sync is not None:
            self.replica_sync.open()
        for spec in self.config.workers:
            self._add(spec)

    async def close(self) -> None:
        await stop([*self._tasks, *self._waking.values()])
        await self.health_checks.close()
        if self.replica_sync is not None:
            await self.replica_sync.close()
        for worker_id in list(self.workers):
            self.leave(worker_id)
        if self._leaving:
            await asyncio.wait(self._leaving)
        if self._context is not None:
            self._context.destroy(0)

    # Workers

    def join(self, worker: Worker[Any], listening: Sequence[Listening] = ()) -> None:
        """Adds a worker, which gets requests once a probe has reached it. `listening`: a source of KV events
        for each of its ranks; () without events. The worker replaces one of the same id and URL. Raises
        ConfigError if another worker has its id."""
        other = self.workers.get(worker.id)
        if other is not None:
            if other.info.url != worker.info.url:
                raise ConfigError(
                    f"the id of a worker must be its own, got {worker.id!r} for {worker.info.url} and "
                    f"{other.info.url}; give one of them another"
                )
            self.leave(worker.id)
        for name, count in zip(COUNTS, self._counts.pop(worker.id, ())):
            setattr(worker, name, count)
        self.workers[worker.id] = worker
        worker.has_events = bool(listening) and self.config.policy != "kv_approx"
        self._listening[worker.id] = listening
        if worker.info.models:
            self._add_to_models(worker)
        self.changed.set()
        self.health_checks.watch(worker)

    def set_role(self, worker: Worker[Any], role: str) -> None:
        """Gives a worker another role. Its requests continue."""
        worker.link.info = worker.info = msgspec.structs.replace(worker.info, role=role)
        for model in self._models_of(worker):
            model.assign(worker)
        self.changed.set()

    def leave(self, worker_id: str) -> None:
        """Removes a worker. Its requests continue at other workers. An unknown id changes nothing."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        worker.is_gone, worker.why = True, worker.why or "it has left"
        self._remove_from_models(worker)
        worker.interrupt()
        self._listening.pop(worker_id, None)
        self._no_wake_before.pop(worker_id, None)
        self._counts[worker_id] = [getattr(worker, name) for name in COUNTS]
        if len(self._counts) > MAX_GONE:
            del self._counts[next(iter(self._counts))]
        self._await_on_close(asyncio.create_task(self._close_link(worker)))

    def model(self, name: str | None) -> ModelPool | None:
        """Returns the model by one of its names; the first model for None. None if no worker has offered
        it."""
        if name is None:
            return next(iter(self.models.values()), None)
        return self.models.get(name)

    @property
    def unknown(self) -> list[str]:
        """The ids of workers whose models are not yet known."""
        return [worker.id for worker in self.workers.values() if not worker.info.models]

    def _add(self, spec: WorkerSpec) -> None:
        if self._connect is None:
            raise ConfigError(f"worker {spec.url} is external, and this router takes native workers only")
        worker = Worker(spec.info(), self._connect(spec), self.clock.now)
        self.join(
            worker,
            [
                functools.partial(self._listen, endpoint=endpoint, replay=replay, topic=spec.topic)
                for endpoint, replay in spec.event_endpoints()
            ],
        )

    async def _close_link(self, worker: Worker[Any]) -> None:
        await self.health_checks.forget(worker)
        try:
            await worker.link.close()
        except (ShoalError, OSError) as error:
            logger.warning("closing the link to worker %s failed: %s", worker.id, error)

    async def _listen(self, feed: EventFeed, endpoint: str, replay: str | None, topic: str) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        await listen(feed, self._context, endpoint, replay, topic)

    # Reports of workers

    def _checked(self, worker: Worker[Any], info: WorkerInfo) -> None:
        if self.workers.get(worker.id) is not worker:
            return
        is_back = not worker.is_reached
        was, worker.info = worker.info, info
        if (was.models, was.adapters) != (info.models, info.adapters):
            self._remove_from_models(worker)
            self._add_to_models(worker)
        if is_back:
            for feed, _ in self._feeds.get(worker.id, ()):
                feed.check()

    def published(self, worker_id: str, loads: Sequence[WorkerLoad]) -> None:
        """Records a worker's load, by rank. An empty report changes nothing."""
        worker = self.workers.get(worker_id)
        if worker is None or not loads:
            return
        worker.loads = loads
        info = worker.info
        kv_tokens = info.total_blocks * info.block_size // len(worker.ranks)
        for model in self._models_of(worker):
            for load in loads:
                model.router.published(
                    WorkerRank(worker.id, load.rank),
                    load.kv_usage,
                    load.num_waiting,
                    load.num_running,
                    kv_tokens,
                )

    def _models_of(self, worker: Worker[Any]) -> list[ModelPool]:
        return [model for model in self._all if model.workers.get(worker.id) is worker]

    def _add_to_models(self, worker: Worker[Any]) -> None:
        """Adds the worker to the models that it serves, if it is compatible with their other workers."""
        info, incompatibility = worker.info, ""
        # All names of a native worker mean one model; an external worker may have several models.
        for names in [(name,) for name in info.models] if info.is_external else [info.models]:
            model = next((self.models[name] for name in names if name in self.models), None)
            why = "" if model is None else model.incompatibility(info, names)
            if why and model is not None and model.workers:
                incompatibility = f"it cannot serve {names[0]!r}: {why}"
                continue
            if model is None or why:
                model = self._replace(model, names[0], info.is_external)
            worker.excluded_reason = model.blocked_reason
            model.add(worker)
            self._name_models()
            if names[0] == info.models[0]:
                self._begin_feeds(worker, model)
        if incompatibility and not self._models_of(worker) and worker.excluded_reason != incompatibility:
            worker.excluded_reason = incompatibility
            logger.warning("worker %s is excluded: %s", worker.id, incompatibility)

    def _replace(self, old: ModelPool | None, name: str, is_external: bool) -> ModelPool:
        """Returns a new model, in place of `old`, which has no workers left."""
        if old is not None:
            self._all.remove(old)
        model = ModelPool(name, is_external, self.config, self.clock)
        for setting, value in self._settings.items():
            model.configure(setting, value)
        if self.config.wake_on_request:
            model.dispatcher.wake = self._wake
        if self.replica_sync is not None:
            self.replica_sync.follow(model)
        self._all.append(model)
        return model

    def _remove_from_models(self, worker: Worker[Any]) -> None:
        """Removes the worker from its models, with its blocks in the index. Excluded workers may be
        compatible now and are tried again."""
        for model in self._models_of(worker):
            model.remove(worker.id)
            if not model.workers:
                model.empty_since = self.clock.now()
        for _, task in self._feeds.pop(worker.id, ()):
            task.cancel()
            self._await_on_close(task)
        self._name_models()
        for other in list(self.workers.values()):
            if other is not worker and other.excluded_reason and not self._models_of(other):
                self._add_to_models(other)

    def _await_on_close(self, task: asyncio.Task[None]) -> None:
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _name_models(self) -> None:
        self.models = {name: model for model in self._all for name in model.current_names()}
        self.changed.set()

    def _begin_feeds(self, worker: Worker[Any], model: ModelPool) -> None:
        if not worker.has_events:
            return
        feeds = []
        for rank, listening in zip(worker.ranks, self._listening.get(worker.id, ())):
            sink = _EventSink(self, worker, model.router)
            feed = EventFeed(sink, rank, worker.info.dp_size)
            feeds.append((feed, start(listening(feed))))
        self._feeds[worker.id] = feeds

    def add_rank(self, worker: Worker[Any], rank: WorkerRank) -> None:
        """Adds a data-parallel rank that a worker without a dp_size has named in its KV events."""
        old = worker.ranks
        worker.ranks = sorted([*old, rank]) if worker.knows_ranks else [rank]
        worker.knows_ranks = True
        for model in self._models_of(worker):
            model.dispatcher.rename_ranks(worker, old)

    async def _maintain(self) -> None:
        while True:
            await self.clock.sleep(TICK_S)
            now = self.clock.now()
            for model in list(self._all):
                model.dispatcher.rebalance()
                model.router.predictions.expire()
                model.router.active_requests.expire()
                if model.empty_since is not None and now - model.empty_since > MODEL_MEMORY_S:
                    self._all.remove(model)
                    self._name_models()

    # FleetControl (shoal.fleet_api)

    def state_of(self, worker_id: str) -> WorkerState | None:
        """Returns None for an unknown id."""
        worker = self.workers.get(worker_id)
        return None if worker is None else worker.state

    def ready(self, model: str, role: str) -> list[str]:
        """Returns the ids of the model's ready workers of this role."""
        return [
            worker.id
            for worker in self.workers.values()
            if worker.state == WorkerState.READY and worker.info.role == role and model in worker.info.models
        ]

    def role_of(self, worker_id: str) -> str | None:
        """Returns the worker's present role; None for an unknown id."""
        worker = self.workers.get(worker_id)
        return None if worker is None else worker.info.role

    def least_loaded(self, model: str, role: str) -> str | None:
        """Returns the model's worker of this role with the fewest requests; None if none accepts requests."""
        found = [
            worker
            for worker in self.workers.values()
            if worker.takes_requests and worker.info.role == role and model in worker.info.models
        ]
        return min(found, key=lambda worker: self._view(worker).active_requests).id if found else None

    def observe(self, name: str, decode_role: str) -> Observation:
        """Returns the state of a model's workers for the planner. `decode_role`: "decode", or "both" without
        separate prefill workers."""
        model = self.models.get(name)
        if model is None:
            return Observation(at=0.0, decode=[], decode_role=decode_role)
        decode = [worker for worker in model.dispatcher.workers.values() if worker.takes_requests]
        prefill, parked = model.prefills.dispatcher, self.parked_ids()
        unavailable = [
            worker
            for worker in model.workers.values()
            if worker.is_reached and not worker.takes_requests and worker.id not in parked
        ]
        paused = [worker for worker in unavailable if worker.is_asleep or worker.num_holds]
        return Observation(
            at=0.0,
            decode=[_decode_load(worker.loads) for worker in decode],
            decode_role=decode_role,
            prefill_workers=sum(
                worker.takes_requests and worker.info.role == "prefill" for worker in prefill.workers.values()
            ),
            prefill_queue=prefill.queue.length,
            queued=model.dispatcher.queue.length,
            paused=len(paused),
            draining=sum(worker.is_draining for worker in unavailable if worker not in paused),
            traffic=copy.copy(model.dispatcher.traffic),
        )

    def view(self) -> FleetView:
        queue = _sum_of_queues(model.dispatcher.queue for model in self._all)
        prefill_queue = _sum_of_queues(model.prefills.dispatcher.queue for model in self._all)
        workers = [self._view(worker) for worker in self.workers.values()]
        planner = None if self.planner_view is None else self.planner_view()
        return FleetView(self.config.policy, workers, queue, prefill_queue, planner)

    def _view(self, worker: Worker[Any]) -> WorkerView:
        info = worker.info
        view = WorkerView(
            id=worker.id,
            url=info.url,
            role=info.role,
            model=info.models[0] if info.models else "",
            state=worker.state,
            why=worker.excluded_reason or worker.why,
            pid=info.pid,
            tags=sorted(info.tags),
            total_blocks=info.total_blocks,
            requests=worker.num_requests,
            hit_rate=worker.cached_tokens / worker.prompt_tokens if worker.prompt_tokens else 0.0,
            asleep=worker.is_asleep,
            weights_version=worker.weights_version,
            prefills_done=worker.num_prefills,
        )
        view.failed, view.breaks = worker.num_failed, worker.num_breaks
        if worker.stats is not None:
            view.apply(worker.stats)
        elif worker.loads:
            view.running = sum(load.num_running for load in worker.loads)
            view.waiting = sum(load.num_waiting for load in worker.loads)
            view.kv = {"device": TierView(max(load.kv_usage for load in worker.loads))}
        if worker.served is not None and not info.is_external:
            view.failed += worker.served.failed
        for model in self._models_of(worker):
            for rank in worker.ranks:
                load = model.router.active_requests.load(rank)
                view.active_requests += load.active_requests
                view.active_blocks += math.ceil(load.active_tokens / model.index.block_size_of(rank))
                view.cached_blocks += model.router.num_cached_blocks(rank)
        return view

    def served(self) -> dict[str, ServedTotals]:
        return {
            worker.id: found for worker in self.workers.values() if (found := _served(worker)) is not None
        }

    async def select(self, model: str | None, body: Mapping[str, Any]) -> Selected:
        found = self._known(model)
        token_ids = body.get("token_ids")
        if token_ids is None:
            if found.tokens is None:
                raise RequestError(
                    "token_ids must be given, as this router does not tokenize for the model",
                    field="token_ids",
                )
            token_ids = await found.tokens.tokens_of(body)
        request = RoutingRequest(
            "",
            token_ids,
            session=body.get("session"),
            cache_salt=body.get("cache_salt"),
            lora_name=found.adapter_of(model),
            tags=frozenset(body.get("tags") or ()),
        )
        return await found.select(request)

    def _known(self, model: str | None) -> ModelPool:
        found = self.model(model)
        if found is None:
            raise UnavailableError(
                f"model must be one that a worker offers ({self._names()}), got {model!r:.100}"
            )
        return found

    def _names(self) -> str:
        return ", ".join(self.models) or "none"

    async def drain(self, worker_id: str) -> None:
        self._worker(worker_id).drain(True)

    async def resume(self, worker_id: str) -> None:
        self._worker(worker_id).drain(False)

    async def change_role(self, worker_id: str, role: str) -> None:
        worker = self._worker(worker_id)
        if worker.info.is_external:
            raise ConfigError(
                f"worker {worker_id} is external, and its role stays both; change the role of native workers"
            )
        await worker.link.change_role(role)

    async def retire(self, worker_id: str) -> None:
        """Drains the worker. Returns when this router has no request there."""
        worker = self._worker(worker_id)
        worker.drain(True)
        await worker.wait_idle()

    async def add(self, spec: str) -> str:
        [worker_id] = await self.change_workers([spec], [])
        return worker_id

    async def remove(self, worker_id: str) -> None:
        await self.change_workers([], [worker_id])

    async def change_workers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        specs = [parse_worker(text, self.config.block_size) for text in add]
        check_distinct(specs)
        for spec in specs:
            if spec.id in self.workers:
                raise ConfigError(
                    f"the id of a new worker must be unused, got {spec.id!r}, which the worker at "
                    f"{self.workers[spec.id].info.url} has; give another (id=NAME), or remove that one first"
                )
        removed = {worker_id: self._worker(worker_id) for worker_id in remove}
        for worker in removed.values():
            if not worker.info.is_external:  # its process would continue without this router
                raise ConfigError(
                    f"remove takes external workers, and worker {worker.id} is native: it leaves when its "
                    f"process ends; to give it no new requests, POST /fleet/drain/{worker.id}"
                )
        for spec in specs:
            self._add(spec)
        for worker in removed.values():
            self._remove(worker)
        return [spec.id for spec in specs]

    def _remove(self, worker: Worker[Any]) -> None:
        models = self._models_of(worker)
        self.leave(worker.id)
        for model in models:  # an operator took the worker away, so the model is not kept for its return
            # An excluded worker may already have replaced the model by its own.
            if not model.workers and model in self._all:
                self._all.remove(model)
        self._name_models()

    async def configure(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in settings:
            if name not in SETTINGS:
                raise ConfigError(
                    f"a setting that changes while running must be one of {', '.join(SETTINGS)}, got {name!r}"
                )
        FleetConfig(**{name: settings.get(name, value) for name, value in self._settings.items()})
        self._settings |= settings
        for model in self._all:
            for name, value in settings.items():
                model.configure(name, value)
        return dict(self._settings)

    def metrics(self) -> Iterable[Metric]:
        yield from fleet_metrics.of_models(self._all)
        workers = self.workers.values()
        yield from fleet_metrics.of_workers(
            [(one, self._view(one), self._prefill_tokens(one)) for one in workers]
        )
        yield from fleet_metrics.of_feeds(
            (worker_id, feed) for worker_id, feeds in self._feeds.items() for feed, _ in feeds
        )
        yield fleet_metrics.one_counter(
            "shoal:router_canaries",
            "Probes of one token, sent to silent workers.",
            self.health_checks.num_canaries,
        )
        if self.planner_view is not None:
            yield from planner_metrics(self.planner_view())
        if self.replica_sync is not None:
            replica_sync = self.replica_sync
            yield fleet_metrics.one_gauge(
                "shoal:router_peers",
                "Other routers that exchange their active requests with this one.",
                replica_sync.num_routers,
            )
            yield fleet_metrics.one_counter(
                "shoal:router_book_changes_told",
                "Changes of active requests sent to other routers.",
                replica_sync.num_sent,
            )
            yield fleet_metrics.one_counter(
                "shoal:router_book_changes_heard",
                "Changes of active requests received from other routers.",
                replica_sync.num_received,
            )

    def _prefill_tokens(self, worker: Worker[Any]) -> int:
        models = self._models_of(worker)
        return sum(
            model.router.active_requests.load(rank).prefill_tokens
            for model in models
            for rank in worker.ranks
        )

    async def command(
        self, command: Command[Any], worker_ids: Sequence[str] | None, *, model: str | None, rolling: bool
    ) -> CommandResults:
        if worker_ids is not None:
            workers = [self._worker(worker_id) for worker_id in worker_ids]
        elif model is not None:
            workers = list(self._known(model).workers.values())
        else:
            if isinstance(command, UpdateWeights) and len(self._all) > 1:
                raise ConfigError(
                    f"model must be given, as there are several: {self._names()}", field="model"
                )
            workers = [worker for worker in self.workers.values() if not worker.info.is_external]
        if not workers:
            raise UnavailableError("the command needs a native worker; start one")
        found = await command_workers(workers, command, rolling=rolling)
        if isinstance(command, UpdateWeights):
            for worker_id in found.results:
                self._forget_blocks(self.workers.get(worker_id))
        return found

    def _forget_blocks(self, worker: Worker[Any] | None) -> None:
        """Forgets the cached KV blocks of a worker with new weights. A worker with events reports that
        itself."""
        if worker is not None and not worker.has_events:
            for model in self._models_of(worker):
                for rank in worker.ranks:
                    model.router.forget_blocks(rank)

    def _wake(self, worker: Worker[Any]) -> bool:
        """Wakes a sleeping worker for a request. Returns whether it is being woken."""
        if self.clock.now() < self._no_wake_before.get(worker.id, 0.0):
            return False
        if worker.id not in self._waking:
            self._waking[worker.id] = start(self._wake_up(worker))
        return True

    async def _wake_up(self, worker: Worker[Any]) -> None:
        logger.info("waking worker %s for a request", worker.id)
        try:
            found = await command_workers([worker], WakeUp(), rolling=False)
            for error in found.errors.values():
                logger.warning("worker %s did not wake up: %s", worker.id, error)
                self._no_wake_before[worker.id] = self.clock.now() + WAKE_AGAIN_S
        finally:
            del self._waking[worker.id]
            worker.changed()

    def _worker(self, worker_id: str) -> Worker[Any]:
        worker = self.workers.get(worker_id)
        if worker is None:
            known = ", ".join(self.workers) or "none"
            raise UnknownWorkerError(f"the id of a worker must be one of {known}, got {worker_id!r:.100}")
        return worker


def _served(worker: Worker[Any]) -> ServedTotals | None:
    """Returns the worker's own counters; for an external worker, a copy of this router's counts."""
    served = worker.served
    if served is None or not worker.info.is_external:
        return served
    return ServedTotals(
        worker.prompt_tokens,
        worker.cached_tokens,
        served.output_tokens,
        worker.num_failed,
        list(served.first_token),
        list(served.between_tokens),
    )


def _decode_load(loads: Sequence[WorkerLoad]) -> DecodeLoad:
    """Returns the last reported load of a worker's ranks, however old: a worker too busy to report is not
    idle."""
    usage = max((load.kv_usage for load in loads if math.isfinite(load.kv_usage)), default=0.0)
    has_slots = any(load.num_running for load in loads)
    return DecodeLoad(usage, sum(load.num_waiting for load in loads), has_slots)


def _sum_of_queues(queues: Iterable[QueueView]) -> QueueView:
    found = list(queues)
    return QueueView(sum(one.length for one in found), max((one.oldest_s for one in found), default=0.0))


class _EventSink:
    """Applies a worker's KV events to the router, and learns the worker's data-parallel ranks from them if
    its dp_size is unknown. Ranks matter, as each has a cache of its own."""

    def __init__(self, fleet: Fleet, worker: Worker[Any], router: KvRouter) -> None:
        self._fleet, self._worker, self._router = fleet, worker, router

    def apply(self, rank: WorkerRank, event: KVEvent) -> None:
        worker = self._worker
        is_new = rank not in worker.ranks or not worker.knows_ranks
        if worker.info.dp_size is None and is_new and isinstance(event, BlockStored):
            self._fleet.add_rank(worker, rank)
        self._router.apply(rank, event)
