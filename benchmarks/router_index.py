"""Speed of the router's index: queries and events, beside NVIDIA Dynamo's own where it is installed.

    python benchmarks/router_index.py [--trace conversation_trace.jsonl] [--json FILE]

Two loads. "Made up": 16 workers, 100,000 blocks in chains of 1,000 that share beginnings; queries of 1,000
block hashes. "Trace": the Mooncake project's conversation trace, each request cached by the worker that had
most of it; a hash id of the trace stands for one block here. Both indexes get the same events and must give
the same answers. Hashing the tokens of a query is measured by itself, as both sides need it. The two take
turns within a run, so that a ratio says something on a busy machine; times are medians. A query finds the
memory cold, as a router's does.

A third load has workers with recurrent layers: each keeps a snapshot of states after every 64th block of the
first load's chains, and a worker's depth is cut to its last one. Shoal's index alone has such workers.

Dynamo's index: `pip install --no-deps ai-dynamo-runtime` (its binding takes events as JSON bytes, and walks a
radix tree; `find_matches` without early exit).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.index.indexer import KvIndexer, WorkerRank
from shoal.fleet.index.prefix_tree import DEVICE, PrefixTree
from shoal.hashing import WIRE_SEED, block_hashes, sequence_hashes

try:
    from dynamo._core import RadixTree
except ImportError:
    RadixTree = None

BLOCK_SIZE, NUM_WORKERS, ROUNDS = 16, 16, 5
Run = tuple[int, list[int], list[int], int | None]  # worker, names, hashes of the blocks alone, parent's name


def made_up(
    rng: random.Random, num_blocks: int = 100_000, length: int = 1000
) -> tuple[list[Run], list[list[int]]]:
    """Chains that begin like another one, for up to two thirds of it, and queries that end in the unknown."""
    chains: list[list[int]] = []
    runs: list[Run] = []
    for number in range(num_blocks // length):
        shared = rng.choice(chains)[: rng.randrange(2 * length // 3)] if chains and rng.random() < 0.7 else []
        chain = [*shared, *(rng.getrandbits(64) for _ in range(length - len(shared)))]
        chains.append(chain)
        runs += cached(number % NUM_WORKERS, chain, 0)
    queries = []
    for _ in range(400):
        known = rng.choice(chains)[: rng.randrange(length // 2, length + 1)]
        queries.append([*known, *(rng.getrandbits(64) for _ in range(length - len(known)))])
    return runs, queries


def from_trace(path: Path, requests: int = 4000) -> tuple[list[Run], list[list[int]]]:
    """Each request is asked for, then cached where most of it was."""
    runs: list[Run] = []
    queries: list[list[int]] = []
    has: list[set[int]] = [set() for _ in range(NUM_WORKERS)]
    for number, line in enumerate(path.read_text().splitlines()[:requests]):
        ids = [(i + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1) for i in json.loads(line)["hash_ids"]]

        def depth(worker: int, ids: list[int] = ids) -> int:
            return next((n for n, i in enumerate(ids) if i not in has[worker]), len(ids))

        depths = [depth(worker) for worker in range(NUM_WORKERS)]
        worker = max(range(NUM_WORKERS), key=lambda w: (depths[w], (w - number) % NUM_WORKERS))
        queries.append(ids)
        runs += cached(worker, ids, depths[worker])
        has[worker].update(ids)
    return runs, queries


def cached(worker: int, chain: list[int], start: int, step: int = 64) -> Iterable[Run]:
    """The events of a prompt whose first `start` blocks are there already, a step's blocks at a time. A
    block's name is its chain hash here."""
    names = sequence_hashes(chain)
    for first in range(start, len(chain), step):
        part = slice(first, first + step)
        yield worker, names[part], chain[part], names[first - 1] if first else None


class Ours:
    name = "shoal"

    def __init__(self) -> None:
        self.index = KvIndexer(BLOCK_SIZE)
        self.ranks = [WorkerRank(str(number)) for number in range(NUM_WORKERS)]

    def prepared(self, number: int, run: Run) -> Callable[[], object]:
        worker, names, hashes, parent = run
        return lambda: self.index.store(self.ranks[worker], DEVICE, names, hashes, parent)

    def asked(self, hashes: list[int]) -> Callable[[], object]:
        chain = sequence_hashes(hashes)
        return lambda: self.index.find_chain(chain)

    def scores(self, found: Any) -> dict[int, int]:
        return {int(rank.worker): overlap.device for rank, overlap in found.items()}


class Dynamos:
    name = "dynamo"

    def __init__(self) -> None:
        self.tree = RadixTree()

    def prepared(self, number: int, run: Run) -> Callable[[], object]:
        worker, names, hashes, parent = run
        blocks = [{"block_hash": name, "tokens_hash": own} for name, own in zip(names, hashes)]
        event = {"event_id": number, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}
        data = json.dumps(event).encode()
        return lambda: self.tree.apply_event(worker, data)

    def asked(self, hashes: list[int]) -> Callable[[], object]:
        return lambda: self.tree.find_matches(hashes)

    def scores(self, found: Any) -> dict[int, int]:
        return {(key[0] if isinstance(key, tuple) else key): score for key, score in found.scores.items()}


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(name: str, runs: list[Run], queries: list[list[int]]) -> list[dict[str, Any]]:
    kinds: list[Any] = [Ours] + ([Dynamos] if RadixTree is not None else [])
    asks: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    rates: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    blocks = sum(len(run[1]) for run in runs)
    sides: list[Any] = []
    for _ in range(ROUNDS):
        sides = [kind() for kind in kinds]
        for side in sides:
            prepared = [side.prepared(number, run) for number, run in enumerate(runs)]
            last = side.asked(queries[-1])
            start = time.perf_counter()
            for call in prepared:
                call()
            last()  # Dynamo's takes events in another thread: only what a query sees has been taken in
            rates[side.name].append(blocks / (time.perf_counter() - start))
    for hashes in queries:
        answers = []
        for side in sides:
            seconds, found = timed(side.asked(hashes))
            asks[side.name].append(seconds)
            answers.append(side.scores(found))
        assert all(answer == answers[0] for answer in answers), (name, answers)
    return [
        {
            "load": name,
            "index": kind.name,
            "blocks": blocks,
            "query_blocks": round(statistics.mean(map(len, queries))),
            "query_us": statistics.median(asks[kind.name]) * 1e6,
            "query_p99_us": statistics.quantiles(asks[kind.name], n=100)[98] * 1e6,
            "event_blocks_per_s": statistics.median(rates[kind.name]),
        }
        for kind in kinds
    ]


def measure_states(runs: list[Run], queries: list[list[int]], distance: int = 64) -> dict[str, Any]:
    """Measures queries about workers with recurrent layers, which have snapshots at this distance."""
    tree = PrefixTree()
    for worker, names, _, before in runs:
        parent = None if before is None else tree.nodes[before]
        for name in names:
            parent = tree.add(worker, DEVICE, name, parent, WIRE_SEED)
            tree.mark(worker, DEVICE, parent, (parent.depth + 1) % distance == 0)
    chains = [sequence_hashes(hashes) for hashes in queries]
    seconds = [timed(lambda chain=chain: tree.depths(chain, DEVICE))[0] for chain in chains]  # type: ignore[misc]
    return {
        "load": f"made up, a snapshot after every {distance} blocks",
        "index": "shoal",
        "blocks": sum(len(run[1]) for run in runs),
        "query_blocks": round(statistics.mean(map(len, queries))),
        "query_us": statistics.median(seconds) * 1e6,
        "query_p99_us": statistics.quantiles(seconds, n=100)[98] * 1e6,
        "event_blocks_per_s": None,
    }


def hashing(rng: random.Random) -> float:
    """Microseconds to hash the 16,000 tokens of a query of 1,000 blocks."""
    tokens = [rng.randrange(150_000) for _ in range(1000 * BLOCK_SIZE)]
    return (
        statistics.median(
            timed(lambda: sequence_hashes(block_hashes(tokens, BLOCK_SIZE)))[0] for _ in range(50)
        )
        * 1e6
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    made = made_up(rng)
    rows = [*measure("made up", *made), measure_states(*made)]
    if given.trace is not None:
        rows += measure("trace", *from_trace(given.trace))
    print("| load | index | blocks | blocks of a query | query, us | p99 | blocks of events a second |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        rate = "-" if row["event_blocks_per_s"] is None else f"{row['event_blocks_per_s']:,.0f}"
        print(
            f"| {row['load']} | {row['index']} | {row['blocks']:,} | {row['query_blocks']} "
            f"| {row['query_us']:.1f} | {row['query_p99_us']:.1f} | {rate} |"
        )
    hashed = hashing(rng)
    print(f"\nhashing the tokens of 1,000 blocks of {BLOCK_SIZE}: {hashed:.0f} us")
    if given.json is not None:
        result = {"python": platform.python_version(), "seed": given.seed, "hashing_us": hashed, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
