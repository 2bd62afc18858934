"""`Simulator`: a fleet on virtual time, with the router's and the planner's own code over simulated workers.
It runs an hour of a trace in seconds.

Events are taken from a heap by time, and at equal times in the order of their creation. So equal input and
seed give equal results, independent of the wall clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.planner.engine_profile import EngineProfile, read_profile
from shoal.fleet.planner.observation import Decision
from shoal.fleet.planner.planner import Planner, read_profiles
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.simulator.config import SimConfig
from shoal.fleet.simulator.model import SimModel
from shoal.fleet.simulator.timing import profile_of
from shoal.fleet.simulator.trace import Trace, TraceRequest
from shoal.fleet.simulator.worker import Run, SimRequest, SimWorker

GAP_CLASS = math.log(1.01)  # gaps between tokens are counted in classes of 1 %


@dataclass(frozen=True, slots=True)
class SimResult:
    """Results of a run. Times are in seconds of the simulation. `throughput`: output tokens per second, from
    time 0 to the last token. `ttft`: from a request's arrival to its first token. `itl`: between two tokens
    of a request, within 1 %. `goodput`: requests per second that meet the planner's targets ttft and itl (the
    mean of a request's gaps); `good_share`: their share. `hit_rate`: share of prompt tokens found in a cache;
    `host_hit_rate`: share of these found in host memory. `remote_share`: share of prompts computed by a
    prefill worker. `workers`: mean number of workers."""

    requests: int
    completed: int
    throughput: float
    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    hit_rate: float
    gpu_hours: float
    simulated_s: float
    goodput: float
    good_share: float
    host_hit_rate: float
    remote_share: float
    workers: float

    def table(self) -> str:
        """Returns a table for people."""
        rows = [
            ("requests", f"{self.requests:,}, {self.completed:,} completed"),
            ("throughput", f"{self.throughput:,.1f} output tokens/s"),
            ("first token, p50", f"{self.ttft_p50:.3f} s"),
            ("first token, p90", f"{self.ttft_p90:.3f} s"),
            ("gap between tokens, p99", f"{self.itl_p99 * 1000:.1f} ms"),
            ("within the planner's targets", f"{self.good_share:.1%}, {self.goodput:.2f} requests/s"),
            ("prompt tokens found in a cache", f"{self.hit_rate:.1%}"),
            ("of these in host memory", f"{self.host_hit_rate:.1%}"),
            ("prompts computed apart", f"{self.remote_share:.1%}"),
            ("workers in the mean", f"{self.workers:.2f}"),
            ("GPU hours", f"{self.gpu_hours:.2f}"),
            ("simulated time", f"{self.simulated_s:,.1f} s"),
        ]
        return "\n".join(f"{name:32}{value}" for name, value in rows)


class Simulation:
    """One run of a trace. `finished`: the requests, in the order of their ends. `decisions`: the planner's
    decisions. `sizes`: at the start and after each change, the time and the numbers of workers by model and
    role, including starting and draining ones."""

    def __init__(self, config: SimConfig, trace: Trace) -> None:
        self.now = 0.0
        self.finished: list[SimRequest] = []
        self.decisions: list[Decision] = []
        self.sizes: list[tuple[float, dict[tuple[str, str], int]]] = []
        self.config, self._trace = config, trace
        numbers = itertools.count()
        self.models = {
            name: SimModel(name, config, trace.block_size, lambda: self.now, lambda: next(numbers))
            for name in dict.fromkeys(map(config.name_of, config.workers))
        }
        self._first_model = next(iter(self.models.values()))
        self._worker_s = 0.0  # summed time of all workers, up to _counted_until
        self._counted_until = 0.0
        self._planner = Planner(config.planner, self._find_profiles())
        self._num_judged = 0
        self._arrivals = iter(enumerate(trace.requests))
        self._gaps: Counter[int] = Counter()  # class -> number of gaps
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    @property
    def router(self) -> KvRouter:
        """The router of the first model."""
        return self._first_model.router

    @property
    def workers(self) -> dict[WorkerRank, SimWorker]:
        """All serving workers."""
        return {
            rank: worker
            for model in self.models.values()
            for role in model.roles.values()
            for rank, worker in role.workers.items()
        }

    def _find_profiles(self) -> dict[str, EngineProfile]:
        """Returns the profiles of the generating workers: from the planner's files, or computed from the
        simulated times."""
        planner = self.config.planner
        if planner.mode != "sla" or planner.profile is not None:
            return read_profiles(planner, self.models)
        if self.config.profile is not None:
            return dict.fromkeys(self.models, read_profile(self.config.profile))
        found = {}
        for name, model in self.models.items():
            group = model.roles[model.decode_role].group
            data = profile_of(
                self.config.gpu,
                group.model or self.config.model,
                group.max_num_seqs,
                model.cache_tokens_of(group),
                group.max_num_batched_tokens,
            )
            found[name] = EngineProfile(data)
        return found

    def run(self) -> SimResult:
        """Runs until every request is finished. Raises ConfigError for a request that exceeds a worker's
        whole cache, and for an unknown model."""
        self._await_arrival()
        self._note_sizes()
        if self.config.planner.enabled:
            self._at(self.config.planner.metric_pulling_interval, self._observe, 1)
        result: SimResult | None = None
        while self._heap:
            self.now, _, happen, arguments = heapq.heappop(self._heap)
            happen(*arguments)
            if result is None and self._is_done:
                self._count_workers()
                result = self._result()
        assert result is not None
        return result

    @property
    def _is_done(self) -> bool:
        return len(self.finished) == len(self._trace.requests)

    # Changes of workers

    def _started(self, model: SimModel, role: str) -> None:
        self._count_workers()
        model.started(role)
        self._got(model, model.send_prompts())

    def _leave(self, model: SimModel, rank: WorkerRank) -> None:
        """Removes a draining worker that is idle."""
        self._count_workers()
        model.leave(rank)
        self._note_sizes()

    def _count_workers(self) -> None:
        num_workers = sum(role.num_workers for model in self.models.values() for role in model.roles.values())
        self._worker_s += num_workers * (self.now - self._counted_until)
        self._counted_until = self.now

    def _note_sizes(self) -> None:
        sizes = {
            (name, role): found.num_workers
            for name, model in self.models.items()
            for role, found in model.roles.items()
        }
        self.sizes.append((self.now, sizes))

    # The planner

    def _observe(self, number: int) -> None:
        if self._is_done:
            return
        planner = self.config.planner
        for name, model in self.models.items():
            self._planner.see(name, model.observe())
        if self.now >= planner.judging_interval * (self._num_judged + 1):
            self._num_judged += 1
            for model_name, decision, _ in self._planner.judge():
                self.decisions.append(decision)
                if not planner.no_operation:
                    self._follow(self.models[model_name], decision)
        self._at((number + 1) * planner.metric_pulling_interval, self._observe, number + 1)

    def _follow(self, model: SimModel, decision: Decision) -> None:
        for move in decision.moves:
            for _ in range(move.count):
                model.change_role(move.role, move.to)
        for change in decision.changes:
            self._count_workers()
            for _ in range(change.count):
                model.roles[change.role].num_starting += 1
                self._at(self.now + self.config.worker_start_s, self._started, model, change.role)
            for _ in range(-change.count):
                idle = model.dismiss(change.role)
                if idle is not None:
                    self._leave(model, idle)
        if decision.changes or decision.moves:
            self._note_sizes()
        self._got(model, model.send_prompts())

    # Requests

    def _at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), happen, arguments))

    def _await_arrival(self) -> None:
        for number, request in itertools.islice(self._arrivals, 1):
            self._at(request.timestamp_s, self._arrive, number, request)

    def _arrive(self, number: int, asked: TraceRequest) -> None:
        self._await_arrival()
        model = self._first_model if asked.model is None else self.models.get(asked.model)
        if model is None:
            raise ConfigError(
                f"request {number} must be for one of {', '.join(self.models)}, got model {asked.model!r}"
            )
        self._got(model, model.arrive(str(number), asked))

    def _got(self, model: SimModel, ranks: Sequence[WorkerRank]) -> None:
        """Starts runs of workers with new requests; a worker is listed once per request. If other requests
        are already waiting at it, a new one cannot start before the run's end."""
        for rank, count in Counter(ranks).items():
            worker = model.worker(rank)
            assert worker is not None
            if worker.run is None:
                self._begin(model, rank, worker)
            elif len(worker.waiting) == count and worker.run.num_steps > 1:
                worker.shorten(self.now)
                self._at(worker.run.end_s, self._end, model, rank, worker, worker.run)
            model.publish(rank, worker)

    def _begin(self, model: SimModel, rank: WorkerRank, worker: SimWorker) -> None:
        run = worker.begin(self.now)
        if run is not None:
            self._at(run.end_s, self._end, model, rank, worker, run)
        elif worker.fetched_s is not None:
            self._at(worker.fetched_s, self._wake, model, rank, worker)

    def _wake(self, model: SimModel, rank: WorkerRank, worker: SimWorker) -> None:
        """Starts a run of an idle worker whose fetch has ended."""
        if worker.run is None:
            self._begin(model, rank, worker)

    def _end(self, model: SimModel, rank: WorkerRank, worker: SimWorker, run: Run) -> None:
        if worker.run is not run or run.end_s != self.now:
            return  # the run was shortened and has another end
        progress = worker.complete()
        ended, got = model.keep_books(progress)
        for gap, count in progress.gaps:
            self._gaps[round(math.log(gap) / GAP_CLASS)] += count
        self.finished += ended
        if self.config.event_delay_ms and (progress.stored or progress.removed):
            self._at(self.now + self.config.event_delay_ms / 1000, model.apply_kv_events, rank, progress)
        else:
            model.apply_kv_events(rank, progress)
        self._begin(model, rank, worker)
        model.publish(rank, worker)
        self._got(model, got)
        for leaver in model.leavers():
            self._leave(model, leaver)

    def _result(self) -> SimResult:
        done, planner = self.finished, self.config.planner
        first = sorted(request.first_token_s - request.arrival_s for request in done)
        prompt_tokens = sum(request.num_tokens for request in done)
        cached = sum(request.cached_tokens for request in done)
        num_good = sum(is_good(request, planner.ttft, planner.itl) for request in done)
        return SimResult(
            requests=len(self._trace.requests),
            completed=len(done),
            throughput=_figure(sum(request.num_generated for request in done) / self.now),
            ttft_p50=_figure(_percentile(first, 0.5)),
            ttft_p90=_figure(_percentile(first, 0.9)),
            itl_p99=_figure(self._gap_percentile(0.99)),
            hit_rate=_figure(cached / prompt_tokens),
            gpu_hours=_figure(self.config.gpus_per_worker * self._worker_s / 3600),
            simulated_s=_figure(self.now),
            goodput=_figure(num_good / self.now),
            good_share=_figure(num_good / len(done)),
            host_hit_rate=_figure(sum(request.host_tokens for request in done) / cached if cached else 0.0),
            remote_share=_figure(sum(model.num_remote for model in self.models.values()) / len(done)),
            workers=_figure(self._worker_s / self.now),
        )

    def _gap_percentile(self, share: float) -> float:
        left = math.ceil(share * self._gaps.total())
        for number, count in sorted(self._gaps.items()):
            left -= count
            if left <= 0:
                return math.exp(number * GAP_CLASS)
        return 0.0


def is_good(request: SimRequest, ttft_s: float, itl_s: float) -> bool:
    """Returns True if a finished request met these targets."""
    gaps = max(1, request.num_generated - 1)
    return (
        request.first_token_s - request.arrival_s <= ttft_s
        and (request.end_s - request.first_token_s) / gaps <= itl_s
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the least value that this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _figure(value: float) -> float:
    return round(value, 6)
