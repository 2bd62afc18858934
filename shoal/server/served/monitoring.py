"""The current state, recent rates and short history of a server or its fleet.

It samples at an interval even without viewers, so that a newly opened page shows the last minutes. Memory is
bounded by the length of the history and the number of workers.
"""

from __future__ import annotations

import asyncio
import collections
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal import __version__
from shoal.errors import ShoalError
from shoal.fleet_api import FleetControl
from shoal.fleet_views import FleetView, ModelView, Point, QueueView, WorkerState, WorkerView
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import ServedModel
from shoal.telemetry.served import RecentRates, ServedTotals, recent_rates, sum_totals, totals_of

INTERVAL_S = 2.0
RATES_S = 10.0  # over which tokens a second are counted
WINDOW_S = 60.0  # over which quantiles are taken
HISTORY_S = 600.0
MAX_HISTORIES = 256  # workers that have a history of their own, the first ones
MANY = 20  # workers per slice, after which other tasks run
POINTS = int(HISTORY_S / INTERVAL_S)


@dataclass(slots=True)
class _Sample:
    """Totals of everything served up to one moment."""

    at: float  # by time.monotonic
    workers: dict[str, ServedTotals]
    models: dict[str, ServedTotals]
    whole: ServedTotals


@dataclass(slots=True)
class _Recent:
    """Recent rates at the last sample."""

    workers: dict[str, RecentRates] = field(default_factory=dict)
    models: dict[str, RecentRates] = field(default_factory=dict)
    whole: RecentRates = RecentRates()


class Monitor:
    """Samples in `run`; `view` works at any time."""

    def __init__(self, models: Catalog, fleet: FleetControl | None = None) -> None:
        """fleet: the fleet of a router; None: the models are this server's own, and each counts as a
        worker."""
        self._models, self._fleet = models, fleet
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=1 + int(WINDOW_S / INTERVAL_S))
        self._recent_rates = _Recent()
        self._history: collections.deque[Point] = collections.deque(maxlen=POINTS)  # the sum of all workers
        self._history_by_worker: dict[str, collections.deque[Point]] = {}
        self._bytes_in: dict[
            str, int
        ] = {}  # KV bytes that each worker had read from others at the last sample

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(INTERVAL_S)

    async def sample(self) -> None:
        """Takes a sample, and adds a point to each history."""
        view = await self._look()
        before = self._samples[-1] if self._samples else None
        sample = self._take(view)
        self._samples.append(sample)
        recent = _Recent(whole=self._recent([one.whole for one in self._samples]))
        for name in sample.models:
            recent.models[name] = self._recent([one.models.get(name) for one in self._samples])
        for number, name in enumerate(sample.workers):
            recent.workers[name] = self._recent([one.workers.get(name) for one in self._samples])
            if number % MANY == MANY - 1:
                await asyncio.sleep(0)  # answers that stream do not wait for a large fleet
        self._recent_rates = recent
        self._fill(view)
        self._remember(view, sample, sample if before is None else before)

    def _remember(self, view: FleetView, sample: _Sample, before: _Sample) -> None:
        """Adds points to the histories: of all workers, and of each."""
        seconds = max(1e-3, sample.at - before.at)
        num_bytes = 0.0
        for one in view.workers:
            moved = max(0, one.bytes_in - self._bytes_in.get(one.id, one.bytes_in)) / seconds
            num_bytes += moved
            point = _point(view.at, [one], one.recent, moved)
            if one.id in before.workers and one.id in sample.workers:
                point.failed = max(0, sample.workers[one.id].failed - before.workers[one.id].failed)
            self._add(one.id, point)
        self._bytes_in = {one.id: one.bytes_in for one in view.workers}
        whole = _point(view.at, view.workers, view.recent, num_bytes)
        if self._fleet is not None:
            whole.waiting += view.queue.length
        whole.failed = max(0, sample.whole.failed - before.whole.failed)
        self._history.append(whole)
        for name, points in list(self._history_by_worker.items()):
            if view.at - points[-1].at > HISTORY_S:
                del self._history_by_worker[name]

    async def view(self, since: float | None = None, worker_id: str | None = None) -> FleetView:
        """Returns the current state, and the history after `since` (seconds since 1970) of one worker if
        it is named; no history without `since`."""
        view = await self._look()
        self._fill(view)
        if since is not None:
            points = self._history if worker_id is None else self._history_by_worker.get(worker_id, ())
            view.history = [point for point in points if point.at > since]
        return view

    def recent(self, model_name: str) -> RecentRates:
        """Returns the recent rates of a model at the last sample."""
        return self._recent_rates.models.get(model_name, RecentRates())

    async def _look(self) -> FleetView:
        """Returns the current state without recent rates."""
        if self._fleet is not None:
            view = self._fleet.view()
        else:
            workers = await asyncio.gather(*map(self._worker, self._models))
            view = FleetView("", workers, QueueView(sum(one.waiting for one in workers)), QueueView())
        view.workers.sort(key=lambda one: (one.role, one.id))
        view.version, view.at = __version__, round(time.time(), 3)
        for model in self._models:
            metrics, admission = model.metrics, model.admission
            view.models.append(
                ModelView(
                    name=model.name,
                    active_requests=admission.active,
                    failed=totals_of(metrics).failed,
                    refused=admission.refused,
                )
            )
        for external in self._models.external:
            failed = sum(one.failed for one in view.workers if one.model == external.name)
            active = external.admission.active
            view.models.append(
                ModelView(name=external.name, is_external=True, active_requests=active, failed=failed)
            )
        return view

    async def _worker(self, model: ServedModel) -> WorkerView:
        """Returns a model of this server as its own worker."""
        view = WorkerView(
            id=model.name, url="", role="both", model=model.name, state=WorkerState.READY, pid=os.getpid()
        )
        metrics = model.metrics
        view.requests = sum(metrics.finished.values()) + model.admission.active
        view.active_requests, view.failed = model.admission.active, totals_of(metrics).failed
        view.hit_rate = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
        if self._models.draining:
            view.state = WorkerState.DRAINING
        try:
            stats, state = await asyncio.gather(model.stats(), model.sleep_state())
            view.apply(stats)
            view.asleep = state.is_sleeping
        except ShoalError as error:
            view.state, view.why = WorkerState.BROKEN, str(error)
        return view

    def _take(self, view: FleetView) -> _Sample:
        """Returns the totals so far. Native models are counted by this server, external ones by worker.
        Sums add the growth of each worker since the last sample, so that a worker that leaves does not
        lower them."""
        last = self._samples[-1] if self._samples else _Sample(0.0, {}, {}, ServedTotals())
        models = {model.name: totals_of(model.metrics) for model in self._models}
        workers = dict(models) if self._fleet is None else dict(self._fleet.served())
        for external in self._models.external:
            ids = [one.id for one in view.workers if one.model == external.name]
            own = {name: workers[name] for name in ids if name in workers}
            models[external.name] = _grown(last.models.get(external.name, ServedTotals()), own, last.workers)
        whole = _grown(last.whole, models, last.models)
        return _Sample(time.monotonic(), workers, models, whole)

    def _recent(self, served: list[ServedTotals | None]) -> RecentRates:
        """Returns the recent rates from the totals at each sample; None: unknown at that sample."""
        known = [(sample.at, one) for sample, one in zip(self._samples, served) if one is not None]
        if len(known) < 2:
            return RecentRates()
        now, last = known[-1]
        since = now - RATES_S - INTERVAL_S / 2  # samples come a little late
        begun, before = next(pair for pair in known if pair[0] >= since or pair is known[-2])
        return recent_rates(last, before, now - begun, known[0][1])

    def _fill(self, view: FleetView) -> None:
        """Writes the recent rates into the view."""
        for worker in view.workers:
            worker.recent = self._recent_rates.workers.get(worker.id, RecentRates())
        for model in view.models:
            model.recent = self.recent(model.name)
        view.recent = self._recent_rates.whole

    def _add(self, worker_id: str, point: Point) -> None:
        points = self._history_by_worker.get(worker_id)
        if points is None and len(self._history_by_worker) < MAX_HISTORIES:
            points = self._history_by_worker[worker_id] = collections.deque(maxlen=POINTS)
        if points is not None:
            points.append(point)


def _grown(
    total: ServedTotals, now: Mapping[str, ServedTotals], before: Mapping[str, ServedTotals]
) -> ServedTotals:
    """Returns `total` plus the growth of each since `before`."""
    return sum_totals([total, *(one.since(before.get(name, ServedTotals())) for name, one in now.items())])


def _point(at: float, workers: Iterable[WorkerView], recent: RecentRates, transfer_bytes_s: float) -> Point:
    workers = list(workers)
    usages = [one.kv["device"].usage for one in workers if "device" in one.kv]
    known = [usage for usage in usages if usage is not None]
    return Point(
        at=at,
        running=sum(one.running for one in workers),
        waiting=sum(one.waiting for one in workers),
        kv_usage=round(sum(known) / len(known), 4) if known else None,
        prompt_tokens_s=recent.prompt_tokens_s,
        output_tokens_s=recent.output_tokens_s,
        hit_rate=recent.hit_rate,
        ttft=recent.ttft,
        itl=recent.itl,
        transfer_bytes_s=round(transfer_bytes_s),
    )
