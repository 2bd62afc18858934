"""Prompts pushed to prefill workers by KV cost, as the router does it, against a queue of work on the plane,
from which free workers take them.

    python benchmarks/prefill_queue.py way      # what one prompt costs on its way between two processes
    python benchmarks/prefill_queue.py choice   # first tokens under load, in virtual time

The queue is written here alone. Its workers take one prompt at a time; pushed prompts come while a worker has
no more than TOKENS_AHEAD tokens under way. Of what waits, either the oldest goes next, or, of the LOOK_AHEAD
oldest, the one of which a free worker has most. A prompt costs STEP_S, and TOKEN_S for each token that is not
cached.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import statistics
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from shoal.api import Request, SamplingParams
from shoal.fake import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.disagg import LOOK_AHEAD, TOKENS_AHEAD
from shoal.fleet.indexer import KvIndexer, WorkerRank
from shoal.fleet.kv_router import KvRouter
from shoal.fleet.planes import open_plane
from shoal.fleet.prefix_tree import DEVICE
from shoal.fleet.remote_engine import RemoteEngine
from shoal.fleet.sim_trace import Trace, TraceRequest, make_customers, make_random
from shoal.fleet.worker import WorkerInfo
from shoal.fleet.worker_port import WorkerPort
from shoal.metrics import ModelMetrics
from shoal.model_card import ModelCard
from shoal.server.admission import Admission
from shoal.wire import ModelInfo

# The way of one prompt

QUEUE, PROMPT_TOKENS = "prefill", 4000
INFO = ModelInfo("fake", 1, 1 << 20, 200_000, 64, (2,), {}, 1024, 16, 4096, "cpu", "float32")
CARD = ModelCard(info=INFO, names=["fake"], model="fake", eos_token_ids=(2,))


class Prompt(msgspec.Struct):
    request: Request


class First(msgspec.Struct):
    token_ids: list[int]
    ticket: bytes | None


async def worker(plane_url: str) -> None:
    """Takes pushed prompts at its port, and those of the queue."""
    engine = FakeEngine(vocab_size=200_000)
    port = WorkerPort.open("w", engine, Admission(1 << 20, 0), ModelMetrics("fake", 4096, {}), LoopClock())
    print(port.address, flush=True)
    plane = open_plane(plane_url)
    while True:
        work = await plane.pull(QUEUE, Prompt)
        async for output in engine.generate(work.message.request):
            first = First(output.token_ids, b"ticket")
        await work.done(first)


def a_prompt(number: str) -> Request:
    return Request(number, list(range(PROMPT_TOKENS)), SamplingParams(max_tokens=1))


async def way(count: int) -> None:
    url = f"ipc:///tmp/shoal-prefill-queue-{time.time_ns()}"
    plane = open_plane(url, may_host=True)
    with subprocess.Popen(
        [sys.executable, __file__, "worker", "--plane", url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        link = RemoteEngine(WorkerInfo(id="w", url=address, models=("fake",)), CARD, address, None)
        await link.check()

        async def pushed(name: str) -> None:
            async for _ in link.generate(a_prompt(name)):
                pass

        async def queued(name: str) -> None:
            ticket = await plane.push(QUEUE, Prompt(a_prompt(name)), First)
            await ticket.answer()

        await queued("first")
        await pushed("first one")
        seconds: dict[str, list[float]] = {"pushed": [], "queued": []}
        cpu = dict.fromkeys(seconds, 0.0)
        for number in range(count):
            for name, send in (("pushed", pushed), ("queued", queued)):
                began, cpu_began = time.perf_counter(), time.process_time()
                await send(f"{name}{number}")
                seconds[name].append(time.perf_counter() - began)
                cpu[name] += time.process_time() - cpu_began
        print("ms from router to first token without computing     p50     p90   CPU of the router")
        for name, found in seconds.items():
            p90 = statistics.quantiles(found, n=10)[-1]
            print(
                f"{name:50} {statistics.median(found) * 1e3:6.2f}  {p90 * 1e3:6.2f}  "
                f"{cpu[name] / count * 1e3:8.2f}"
            )
        await link.close()
        await plane.close()
        process.kill()


# The choice of a worker

STEP_S, TOKEN_S = 0.010, 40e-6  # of an 8B model on one H200, about
CACHE_TOKENS = 400_000


class Worker:
    """Computes one prompt after the other, and keeps the last ones' blocks."""

    def __init__(self, name: str, block_size: int) -> None:
        self.rank, self.block_size = WorkerRank(name), block_size
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.given: deque[TraceRequest] = deque()
        self.is_busy = False

    def num_cached(self, chain: Sequence[int]) -> int:
        return next((i for i, block in enumerate(chain) if block not in self.cache), len(chain))

    def seconds(self, request: TraceRequest) -> float:
        cached = self.num_cached(request.hash_ids) * self.block_size
        return STEP_S + max(1, request.input_length - cached) * TOKEN_S

    def keep(self, chain: Sequence[int]) -> list[int]:
        """Returns the blocks that had to go."""
        for block in reversed(chain):
            self.cache[block] = None
            self.cache.move_to_end(block)
        gone = max(0, len(self.cache) - CACHE_TOKENS // self.block_size)
        return [self.cache.popitem(last=False)[0] for _ in range(gone)]


class Simulation:
    """`place(request)` is called for each arrival, `next_for(worker)` when a worker is free."""

    def __init__(self, trace: Trace, num_workers: int, way_s: float) -> None:
        self.now, self.way_s, self.trace = 0.0, way_s, trace
        self.workers = [Worker(f"p{i}", trace.block_size) for i in range(num_workers)]
        self.waiting: deque[TraceRequest] = deque()
        self.first_s: list[float] = []
        self.cached = self.busy_s = 0.0
        self._numbers, self._due = itertools.count(), list[tuple[float, int, Callable[..., None], Any]]()

    def run(self) -> None:
        for request in self.trace.requests:
            self.at(request.timestamp_s, self.arrive, request)
        while self._due:
            self.now, _, happen, what = heapq.heappop(self._due)
            happen(what)

    def at(self, when: float, happen: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), happen, what))

    def compute(self, worker: Worker, request: TraceRequest) -> None:
        worker.is_busy = True
        self.cached += worker.num_cached(request.hash_ids) * worker.block_size
        self.busy_s += worker.seconds(request)
        self.at(self.now + worker.seconds(request), self.computed, (worker, request))

    def computed(self, done: tuple[Worker, TraceRequest]) -> None:
        worker, request = done
        worker.is_busy = False
        self.first_s.append(self.now + self.way_s / 2 - request.timestamp_s)
        self.ended(worker, request, worker.keep(request.hash_ids))

    def arrive(self, request: TraceRequest) -> None:
        raise NotImplementedError

    def ended(self, worker: Worker, request: TraceRequest, gone: list[int]) -> None:
        raise NotImplementedError


class Pushed(Simulation):
    """The router's own choice and books; a worker with more than TOKENS_AHEAD under way gets nothing."""

    look_ahead = 1

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.router = KvRouter(
            KvIndexer(self.trace.block_size),
            workers=[worker.rank for worker in self.workers],
            seed=0,
            clock=lambda: self.now,
        )

    def arrive(self, request: TraceRequest) -> None:
        self.waiting.append(request)
        self.give()

    def give(self) -> None:
        while self.waiting:
            free = [
                worker
                for worker in self.workers
                if self.router.books.load(worker.rank).prefill_tokens <= TOKENS_AHEAD
            ]
            if not free:
                return
            oldest = list(itertools.islice(self.waiting, self.look_ahead))
            request = max(oldest, key=lambda one: max(worker.num_cached(one.hash_ids) for worker in free))
            self.waiting.remove(request)
            choice = self.router.schedule_chains(
                request.input_length,
                {self.trace.block_size: list(request.hash_ids)},
                request_id=str(id(request)),
                among=[worker.rank for worker in free],
            )
            worker = next(worker for worker in free if worker.rank == choice.rank)
            self.at(self.now + self.way_s / 2, self.reach, (worker, request))

    def reach(self, given: tuple[Worker, TraceRequest]) -> None:
        worker, request = given
        worker.given.append(request)
        if not worker.is_busy:
            self.compute(worker, worker.given.popleft())

    def ended(self, worker: Worker, request: TraceRequest, gone: list[int]) -> None:
        for block in gone:
            self.router.indexer.remove(worker.rank, DEVICE, block)
        chain = list(request.hash_ids)
        self.router.indexer.store(worker.rank, DEVICE, chain, chain, None)
        self.router.books.first_token(str(id(request)))
        self.router.books.end(str(id(request)))
        if worker.given:
            self.compute(worker, worker.given.popleft())
        self.give()


class PushedByCache(Pushed):
    look_ahead = LOOK_AHEAD


class Queued(Simulation):
    """The oldest prompt goes to the first free worker."""

    look_ahead = 1

    def arrive(self, request: TraceRequest) -> None:
        self.at(self.now + self.way_s / 4, self.queue, request)  # to the hub

    def queue(self, request: TraceRequest) -> None:
        self.waiting.append(request)
        for worker in self.workers:
            self.take(worker)

    def take(self, worker: Worker) -> None:
        if worker.is_busy or not self.waiting:
            return
        oldest = list(itertools.islice(self.waiting, self.look_ahead))
        best = max(oldest, key=lambda request: worker.num_cached(request.hash_ids))
        self.waiting.remove(best)
        worker.is_busy = True
        self.at(self.now + self.way_s / 4, lambda request: self.compute(worker, request), best)

    def ended(self, worker: Worker, request: TraceRequest, gone: list[int]) -> None:
        self.take(worker)


class QueuedByCache(Queued):
    look_ahead = LOOK_AHEAD


WAYS = {
    "pushed, in turn": Pushed,
    "pushed, best of 16": PushedByCache,
    "queue, in turn": Queued,
    "queue, best of 16": QueuedByCache,
}


def choice(way_ms: dict[str, float], num_requests: int) -> None:
    loads: list[tuple[str, int, list[float], Callable[[float], Trace]]] = [
        ("150 customers", 2, [6.0, 9.0, 12.0], lambda rate: make_customers(num_requests, rate)),
        ("150 customers", 4, [12.0, 18.0, 24.0], lambda rate: make_customers(num_requests, rate)),
        (
            "nothing shared, 1,000 to 6,000 tokens",
            4,
            [12.0, 18.0, 22.0],
            lambda rate: make_random(num_requests, rate, input_tokens=(1000, 6000), block_size=16),
        ),
    ]
    print("| load | workers | requests/s | how | p50, ms | p99, ms | cached | busy |")
    print("|---|---|---|---|---|---|---|---|")
    for name, num_workers, rates, make in loads:
        for rate in rates:
            trace = make(rate)
            total = sum(request.input_length for request in trace.requests)
            for how, kind in WAYS.items():
                simulation = kind(
                    trace, num_workers, way_ms["pushed" if issubclass(kind, Pushed) else "queued"] / 1e3
                )
                simulation.run()
                found = simulation.first_s
                assert len(found) == len(trace.requests)
                p99 = statistics.quantiles(found, n=100)[-1]
                print(
                    f"| {name} | {num_workers} | {rate:g} | {how} | {statistics.median(found) * 1e3:.0f} | "
                    f"{p99 * 1e3:.0f} | {simulation.cached / total:.0%} | "
                    f"{simulation.busy_s / num_workers / simulation.now:.0%} |"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("way", "choice", "worker"))
    parser.add_argument("--count", type=int, default=300, help="prompts one after the other")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--pushed-ms", type=float, default=1.0, help="the way there and back")
    parser.add_argument("--queued-ms", type=float, default=2.0)
    parser.add_argument("--plane", default="")
    given = parser.parse_args()
    if given.part == "worker":
        asyncio.run(worker(given.plane))
    elif given.part == "way":
        asyncio.run(way(given.count))
    else:
        choice({"pushed": given.pushed_ms, "queued": given.queued_ms}, given.requests)
