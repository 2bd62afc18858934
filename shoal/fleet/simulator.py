"""A fleet on a virtual clock: the router's own code over simulated workers, an hour of a trace in seconds.

Everything that happens is an event with a time, taken from a heap. Events of one time happen in the order in
which they were made, so equal input and seed give equal results, and no clock on the wall has a part in them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.fleet.indexer import KvIndexer, WorkerRank
from shoal.fleet.kv_router import KvRouter
from shoal.fleet.planner import Decision, DecodeLoad, Observation, PlannerState, decide
from shoal.fleet.prefix_tree import DEVICE
from shoal.fleet.sim_config import SimConfig, SimWorkers
from shoal.fleet.sim_timing import find_timing
from shoal.fleet.sim_trace import Trace, TraceRequest
from shoal.fleet.sim_worker import Progress, Run, SimRequest, SimWorker
from shoal.hashing import sequence_hashes

GAP_CLASS = math.log(1.01)  # gaps between tokens are counted in classes of one per cent


@dataclass(frozen=True, slots=True)
class SimResult:
    """Times are in seconds of the simulation. `throughput`: output tokens a second, from time 0 to the last
    token. `ttft`: from a request's time to its first token. `itl`: between two tokens of a request, within
    one per cent. `hit_rate`: the share of prompt tokens that were found in a cache."""

    requests: int
    completed: int
    throughput: float
    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    hit_rate: float
    gpu_hours: float
    simulated_s: float

    def table(self) -> str:
        """For a reader."""
        rows = [
            ("requests", f"{self.requests:,}, {self.completed:,} completed"),
            ("throughput", f"{self.throughput:,.1f} output tokens/s"),
            ("first token, p50", f"{self.ttft_p50:.3f} s"),
            ("first token, p90", f"{self.ttft_p90:.3f} s"),
            ("gap between tokens, p99", f"{self.itl_p99 * 1000:.1f} ms"),
            ("prompt tokens found in a cache", f"{self.hit_rate:.1%}"),
            ("GPU hours", f"{self.gpu_hours:.2f}"),
            ("simulated time", f"{self.simulated_s:,.1f} s"),
        ]
        return "\n".join(f"{name:32}{value}" for name, value in rows)


class Simulation:
    """One run of a trace. `finished`: the requests, in the order of their ends. `decisions`: those of the
    planner."""

    def __init__(self, config: SimConfig, trace: Trace) -> None:
        self.now = 0.0
        self.finished: list[SimRequest] = []
        self.decisions: list[Decision] = []
        self.workers: dict[WorkerRank, SimWorker] = {}  # those that serve
        self._leaving: set[WorkerRank] = set()  # of these, those that finish what they have
        self._num_starting = 0
        self._num_made = 0
        self._worker_s = 0.0  # of all workers, from their starts, up to _counted_until
        self._counted_until = 0.0
        self._config, self._trace = config, trace
        self._timing = find_timing(config.gpu, config.model)
        self._state = PlannerState()
        self._observations: list[Observation] = []
        for group in config.workers:
            for _ in range(group.count):
                self._enter(group)
        self.router = KvRouter(
            KvIndexer(trace.block_size),
            workers=self.workers,
            policy=config.policy,
            weights=config.weights,
            seed=config.seed,
            clock=lambda: self.now,
        )
        self._arrivals = iter(enumerate(trace.requests))
        self._gaps: Counter[int] = Counter()  # class -> how many
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def run(self) -> SimResult:
        """Until every request has been answered. Raises ConfigError for a request that a worker's whole cache
        has no room for."""
        self._await_arrival()
        if self._config.planner.enabled:
            self._at(self._config.planner.metric_pulling_interval, self._observe, 1)
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

    # Workers come and go

    def _enter(self, group: SimWorkers) -> WorkerRank:
        """A worker serves from now on."""
        tokens = self._config.cache_tokens
        if tokens is None:
            tokens = self._timing.cache_tokens(group.gpu_memory_utilization)
        rank = WorkerRank(f"sim-{self._num_made}")
        self._num_made += 1
        self.workers[rank] = SimWorker(
            self._timing, tokens, self._trace.block_size, group.max_num_seqs, group.max_num_batched_tokens
        )
        return rank

    def _started(self) -> None:
        self._count_workers()
        self._num_starting -= 1
        self.router.add_worker(self._enter(self._config.workers[0]))

    def _leave(self, rank: WorkerRank) -> None:
        """A worker that drains has nothing left to do."""
        self._count_workers()
        self._leaving.discard(rank)
        del self.workers[rank]
        self.router.remove_worker(rank)

    def _count_workers(self) -> None:
        num_workers = len(self.workers) + self._num_starting
        self._worker_s += num_workers * (self.now - self._counted_until)
        self._counted_until = self.now

    # The planner

    def _observe(self, number: int) -> None:
        if self._is_done:
            return
        planner = self._config.planner
        loads = [
            DecodeLoad(round(worker.kv_usage, 6), len(worker.waiting))
            for rank, worker in self.workers.items()
            if rank not in self._leaving
        ]
        pending = self._num_starting + len(self._leaving)
        self._observations.append(Observation(at=self.now, decode=loads, decode_role="both", pending=pending))
        if self.now >= planner.adjustment_interval * (len(self.decisions) + 1):
            decision, self._state = decide(planner, self._state, self._observations)
            self._observations.clear()
            self.decisions.append(decision)
            if not planner.no_operation:
                self._follow(decision)
        self._at((number + 1) * planner.metric_pulling_interval, self._observe, number + 1)

    def _follow(self, decision: Decision) -> None:
        for change in decision.changes:
            if change.count > 0:
                self._count_workers()
                self._num_starting += 1
                self._at(self.now + self._config.worker_start_s, self._started)
            else:
                idlest = min(
                    (rank for rank in self.workers if rank not in self._leaving),
                    key=lambda rank: (self.workers[rank].kv_usage, rank),
                )
                self._leaving.add(idlest)
                if self.workers[idlest].is_idle:
                    self._leave(idlest)

    # Requests

    def _at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), happen, arguments))

    def _await_arrival(self) -> None:
        for number, request in itertools.islice(self._arrivals, 1):
            self._at(request.timestamp_s, self._arrive, number, request)

    def _arrive(self, number: int, asked: TraceRequest) -> None:
        self._await_arrival()
        chain = sequence_hashes(asked.hash_ids)
        request = SimRequest(
            str(number), self.now, asked.input_length, asked.output_length, chain, asked.hash_ids
        )
        choice = self.router.schedule_chains(
            asked.input_length,
            {self._trace.block_size: chain},
            request_id=request.id,
            session=asked.session,
            among=[rank for rank in self.workers if rank not in self._leaving],
        )
        worker = self.workers[choice.rank]
        was_waiting = bool(worker.waiting)
        worker.add(request)
        if worker.run is None:
            self._begin(choice.rank, worker)
        elif not was_waiting and worker.run.num_steps > 1:
            worker.shorten(self.now)
            self._at(worker.run.end_s, self._end, choice.rank, worker, worker.run)
        self._publish(choice.rank, worker)

    def _begin(self, rank: WorkerRank, worker: SimWorker) -> None:
        run = worker.begin(self.now)
        if run is not None:
            self._at(run.end_s, self._end, rank, worker, run)

    def _end(self, rank: WorkerRank, worker: SimWorker, run: Run) -> None:
        if worker.run is not run or run.end_s != self.now:
            return  # the run was shortened, and has ended before or ends earlier
        progress = worker.complete()
        self._keep_books(rank, progress)
        for gap, count in progress.gaps:
            self._gaps[round(math.log(gap) / GAP_CLASS)] += count
        self.finished += progress.ended
        if self._config.event_delay_ms and (progress.stored or progress.removed):
            self._at(self.now + self._config.event_delay_ms / 1000, self._tell, rank, progress)
        else:
            self._tell(rank, progress)
        self._begin(rank, worker)
        self._publish(rank, worker)
        if rank in self._leaving and worker.is_idle:
            self._leave(rank)

    # What the router hears

    def _keep_books(self, rank: WorkerRank, progress: Progress) -> None:
        books = self.router.books
        for request in progress.first:
            books.first_token(request.id)
        for request in progress.decoded:
            books.generated(request.id, progress.num_steps)
        for request in progress.ended:
            books.end(request.id)

    def _publish(self, rank: WorkerRank, worker: SimWorker) -> None:
        self.router.published(rank, worker.kv_usage, len(worker.waiting))

    def _tell(self, rank: WorkerRank, progress: Progress) -> None:
        """KV events of a run; `kv_approx` is a router without them."""
        if self._config.policy == "kv_approx" or rank not in self.workers:
            return
        index = self.router.indexer
        for block in progress.removed:
            index.remove(rank, DEVICE, block)
        for request, start, end in progress.stored:
            parent = request.chain[start - 1] if start else None
            index.store(rank, DEVICE, request.chain[start:end], request.own_hashes[start:end], parent)

    def _result(self) -> SimResult:
        done = self.finished
        first = sorted(request.first_token_s - request.arrival_s for request in done)
        prompt_tokens = sum(request.num_tokens for request in done)
        return SimResult(
            requests=len(self._trace.requests),
            completed=len(done),
            throughput=_figure(sum(request.num_generated for request in done) / self.now),
            ttft_p50=_figure(_percentile(first, 0.5)),
            ttft_p90=_figure(_percentile(first, 0.9)),
            itl_p99=_figure(self._gap_percentile(0.99)),
            hit_rate=_figure(sum(request.cached_tokens for request in done) / prompt_tokens),
            gpu_hours=_figure(self._worker_s / 3600),
            simulated_s=_figure(self.now),
        )

    def _gap_percentile(self, share: float) -> float:
        left = math.ceil(share * self._gaps.total())
        for number, count in sorted(self._gaps.items()):
            left -= count
            if left <= 0:
                return math.exp(number * GAP_CLASS)
        return 0.0


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that is not exceeded by this share of them."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _figure(value: float) -> float:
    return round(value, 6)
