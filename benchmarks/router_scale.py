"""CPU time of the router and the planner as a fleet grows. The table is in benchmarks/results/routing.md.

    python benchmarks/router_scale.py [--json benchmarks/results/router-scale.json]

Each fleet gets 10 requests/s for each worker, so 1,000 workers get 10,000 a second: customers with contexts
of 1,920 tokens, asked again and again, with fresh questions of 240. The workers themselves are not simulated:
a request's first token comes, eight times sixteen tokens, KV events for what it computed, and its end, by a
virtual clock. Timed is the CPU time of the choice (index, predictions, policy, active requests), of the
events after it, and of a decision of the planner over an interval of ten looks at all workers.

Then several routers share the largest fleet: the work of a router for another router's request is timed too
(its active requests sent and received, its KV events received), from which each router's cores follow. They
are not run beside each other, and sockets have no part in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.index.indexer import KvIndexer, WorkerRank
from shoal.fleet.index.prefix_tree import DEVICE
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.planner.planner import PlannerState, decide
from shoal.fleet.pool.replica_sync import SharedChanges
from shoal.fleet.registry.subscription import encode
from shoal.fleet.routing.active_requests import AnyChange
from shoal.fleet.routing.dispatcher import Dispatcher, RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.simulator.timing import profile_of
from shoal.fleet.traffic import Traffic
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.hashing import sequence_hashes

SIZES = (10, 30, 100, 300, 1000)
REQUESTS_PER_WORKER = 10  # a second
BLOCK, CONTEXT, QUESTION, OUTPUT = 16, 120, 15, 128  # tokens, blocks, blocks, tokens
CUSTOMERS_PER_WORKER = 4
REQUEST_S = 2.0  # how long an answer takes
NUM_REQUESTS = 2000  # that are timed; before them come as many as run at once
NUM_LOOKS = 10
NUM_ROUTERS = (1, 2, 4, 8, 16)

CHANGES = msgspec.msgpack.Decoder(SharedChanges)


class Clock:
    """The time of requests, not of the wall."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Fleet:
    def __init__(self, num_workers: int, seed: int = 0) -> None:
        self.clock, self.rng = Clock(), Random(seed)
        self.router = KvRouter(KvIndexer(BLOCK), seed=seed, clock=self.clock.now)
        self.dispatcher: Dispatcher[Any] = Dispatcher(self.router, max_queued=100_000, clock=self.clock)
        for number in range(num_workers):
            info = WorkerInfo(id=f"worker-{number}", url="", models=("m",))
            worker = Worker(info, None, self.clock.now)
            worker.reached()
            self.dispatcher.add(worker)
        self.rate = num_workers * REQUESTS_PER_WORKER
        self.num_customers = num_workers * CUSTOMERS_PER_WORKER
        self.running: deque[tuple[float, str, WorkerRank]] = deque()
        self.fresh = self.num_customers * CONTEXT
        self.number = 0
        self.choose_s = self.follow_s = self.tell_s = self.hear_s = 0.0
        self.hits = 0  # blocks that the chosen workers had
        self.other: Fleet | None = None  # another router of these workers
        self.unsent: list[AnyChange] = []

    def share(self) -> None:
        """A second router hears of all requests from now on."""
        self.other = Fleet(len(self.dispatcher.workers))
        self.router.active_requests.on_change = self.unsent.append

    def _tell(self, other: Fleet, stored: tuple[Any, ...] | None) -> None:
        """One message for each request, which is the most that there are: under load many go in one."""
        begun = time.process_time()
        payload = encode(SharedChanges("a", "m", self.unsent))
        told = time.process_time()
        self.unsent.clear()
        for change in CHANGES.decode(payload).changes:
            other.router.take(change, f"a/{change.request_id}")
        if stored is not None:
            other.router.indexer.store(*stored)
        self.tell_s += told - begun
        self.hear_s += time.process_time() - told

    def ask(self) -> None:
        """One request comes; those whose time is over end."""
        self.clock.time += self.rng.expovariate(self.rate)
        customer = self.rng.randrange(self.num_customers)
        names = [
            *range(customer * CONTEXT, (customer + 1) * CONTEXT),
            *range(self.fresh, self.fresh + QUESTION),
        ]
        self.fresh += QUESTION
        self.number += 1
        chain = sequence_hashes(names)
        request = RoutingRequest(f"r{self.number}", range(len(chain) * BLOCK))
        begun = time.process_time()
        found = self.dispatcher._pick(request, {BLOCK: chain})
        chosen = time.process_time()
        assert found is not None
        _, choice = found
        active_requests, index, rank = self.router.active_requests, self.router.indexer, choice.rank
        start = choice.overlap.total
        self.hits += start
        stored = None
        if start < len(chain):
            stored = rank, DEVICE, chain[start:], names[start:], chain[start - 1] if start else None
            index.store(*stored)
        active_requests.first_token(request.request_id)
        for _ in range(OUTPUT // 16):
            active_requests.generated(request.request_id, 16)
        self.running.append((self.clock.time + REQUEST_S, request.request_id, rank))
        while self.running[0][0] <= self.clock.time:
            _, request_id, ended_at = self.running.popleft()
            active_requests.end(request_id)
            self.dispatcher.workers[ended_at.worker].active -= 1
        self.router.published(rank, 0.5, 0, 20, 100_000)
        followed = time.process_time()
        self.choose_s += chosen - begun
        self.follow_s += followed - chosen
        if self.other is not None:
            self._tell(self.other, stored)

    def measure(self) -> dict[str, Any]:
        for _ in range(int(self.rate * REQUEST_S)):
            self.ask()
        gc.collect()
        self.choose_s = self.follow_s = self.tell_s = self.hear_s = 0.0
        self.hits = 0
        for _ in range(NUM_REQUESTS):
            self.ask()
        return {
            "choose_us": round(1e6 * self.choose_s / NUM_REQUESTS, 1),
            "follow_us": round(1e6 * self.follow_s / NUM_REQUESTS, 1),
            "hit_rate": round(self.hits / (NUM_REQUESTS * (CONTEXT + QUESTION)), 3),
            "busiest": self._busiest(),
        }

    def _busiest(self) -> float:
        """The busiest worker's requests, over the mean."""
        active = [worker.active for worker in self.dispatcher.workers.values()]
        return round(max(active) * len(active) / sum(active), 2)


def planner_ms(num_workers: int, mode: str) -> float:
    """CPU of one decision, with the looks before it."""
    config = PlannerConfig(mode=mode, max_gpu_budget=2 * num_workers)
    profile = EngineProfile(profile_of("h200", "qwen3-8b", 1024, 700_000))
    state, traffic, now, decisions, seconds = PlannerState(), Traffic(), 0.0, 0, 0.0
    while decisions < 5:
        begun = time.process_time()
        looks = []
        for _ in range(NUM_LOOKS):
            now += 1.0
            for _ in range(3):
                traffic.arrived(2160)
                traffic.began(0.2)
                traffic.ended(OUTPUT, 1.5)
            traffic.num_requests += num_workers * REQUESTS_PER_WORKER
            traffic.input_tokens += num_workers * REQUESTS_PER_WORKER * 2160
            loads = [DecodeLoad(0.7) for _ in range(num_workers)]
            looks.append(Observation(at=now, decode=loads, traffic=Traffic(**_fields(traffic))))
        _, state = decide(config, state, looks, profile=profile)
        seconds += time.process_time() - begun
        decisions += 1
    return round(1000 * seconds / decisions, 2)


def _fields(traffic: Traffic) -> dict[str, Any]:
    return {name: getattr(traffic, name) for name in traffic.__struct_fields__}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(num_workers: int) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    fleet = Fleet(num_workers)
    row = {"workers": num_workers, "requests_per_s": fleet.rate, **fleet.measure()}
    memory = resident_bytes() - before
    cost_us = row["choose_us"] + row["follow_us"]
    return {
        **row,
        "cores": round(fleet.rate * cost_us / 1e6, 2),
        "memory_mb": round(memory / 1e6, 1),
        "planner_load_ms": planner_ms(num_workers, "load"),
        "planner_sla_ms": planner_ms(num_workers, "sla"),
    }


def measure_sharing(num_workers: int) -> dict[str, Any]:
    """Returns microseconds of CPU per request, by kind of work, and the cores of each router, by their
    number."""
    fleet = Fleet(num_workers)
    fleet.share()
    row = fleet.measure()
    own_us = row["choose_us"] + row["follow_us"] + 1e6 * fleet.tell_s / NUM_REQUESTS
    hear_us = 1e6 * fleet.hear_s / NUM_REQUESTS
    return {
        "workers": num_workers,
        "requests_per_s": fleet.rate,
        "own_us": round(own_us, 1),
        "hear_us": round(hear_us, 1),
        "cores": {
            count: round(fleet.rate * (own_us + (count - 1) * hear_us) / count / 1e6, 2)
            for count in NUM_ROUTERS
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| workers | requests/s | choice, us | what follows, us | cores for all | hit rate | busiest / mean "
        "| MB | decision by load, ms | for latency, ms |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        cells = [
            f"{row['workers']:,}",
            f"{row['requests_per_s']:,}",
            f"{row['choose_us']:,.0f}",
            f"{row['follow_us']:,.0f}",
            f"{row['cores']:.2f}",
            f"{row['hit_rate']:.0%}",
            f"{row['busiest']:.2f}",
            f"{row['memory_mb']:,.1f}",
            f"{row['planner_load_ms']:.1f}",
            f"{row['planner_sla_ms']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    rows = []
    # A process for each, as memory that one has given back would hide what the next one takes.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in pool.map(measure, arguments.sizes):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        sharing = pool.submit(measure_sharing, max(arguments.sizes)).result()
    print(table(rows))
    print(sharing)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"python": sys.version.split()[0], "rows": rows, "sharing": sharing}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
