"""Cost of monitoring for a server: decode throughput and CPU time a token, watched and not, in one run.

    python benchmarks/watching.py                  # `shoal serve` with the small default model
    python benchmarks/watching.py --workers 2      # a router and workers, all on this host
    python benchmarks/watching.py --shape qwen3-8b --streams 64 --seconds 3   # on a GPU, random weights

A few answers stream all the time. Meanwhile windows of some seconds take turns, in a random order in each
pair: in the one a dashboard, a `shoal top` and a Prometheus look on, in the other nobody does. They are
clients in this process that send the requests of the real ones, as often; a browser's own work is not
measured. That the server samples itself at an interval belongs to both. On a machine that others use, believe
the CPU time of the server's processes for a token more than the tokens a second. Intervals are bootstrapped
over pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
import psutil
from workloads import write_model

from tests.fleet_processes import Processes
from tests.serving import Serve

LOOKS_S = {"dashboard": 2.0, "top": 2.0, "prometheus": 5.0}
REMEMBERED, ASKED, IDLE_S = 256, 200, 20.0
SETTLE_S = 1.0  # at a window's beginning, which counts for neither
SMALL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "200000000", "--device", "cpu")
RANDOM = ("--max-model-len", "2048", "--load-format", "dummy", "--skip-tokenizer-init")


@dataclass
class Window:
    tokens: float  # a second
    cpu_ms: float  # all the server's processes together, per token


class Load:
    """Answers that stream all the time; `tokens` counts theirs."""

    def __init__(self, session: aiohttp.ClientSession, url: str, streams: int) -> None:
        self.tokens = 0
        self._session, self._url = session, url
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(streams)]

    async def _stream(self, number: int) -> None:
        body = {"prompt": list(range(number, number + 10)), "stream": True, "ignore_eos": True}
        draw = random.Random(number)
        while True:
            body["max_tokens"] = draw.randint(50, 150)  # a token of a long answer costs more
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    self.tokens += line.startswith(b"data: {")

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Watchers:
    """Clients that poll as a dashboard, `shoal top` and Prometheus do, until they are ended."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        looks = {"dashboard": self._dashboard, "top": self._top, "prometheus": self._prometheus}
        self._tasks = [asyncio.create_task(self._look(looks[name], s)) for name, s in LOOKS_S.items()]

    async def _look(self, look, seconds: float) -> None:
        since = 0.0
        while True:
            since = await look(since)
            await asyncio.sleep(seconds)

    async def _dashboard(self, since: float) -> float:
        latest = await self._top(since)
        await self._get("/requests?limit=100")
        return latest

    async def _top(self, since: float) -> float:
        view = json.loads(await self._get(f"/fleet?since={since}"))
        return max([since, *(point["at"] for point in view.get("history", ()))])

    async def _prometheus(self, since: float) -> float:
        await self._get("/metrics")
        return since

    async def _get(self, path: str) -> bytes:
        async with self._session.get(self._url + path) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                raise found  # what nobody has looked at was not measured


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(url: str, pids: list[int], arguments: argparse.Namespace) -> list[tuple[Window, Window]]:
    """Pairs of windows: watched, and not."""
    processes = [one for pid in pids for one in family(pid)]
    order, pairs = random.Random(arguments.seed), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await tell_costs(session, url, processes)
        load = Load(session, url, arguments.streams)
        await asyncio.sleep(arguments.warm_up)
        for number in range(arguments.pairs):
            found: dict[bool, Window] = {}
            for watched in order.sample([True, False], 2):
                watchers = Watchers(session, url) if watched else None
                await asyncio.sleep(SETTLE_S)
                tokens, cpu, begun = load.tokens, cpu_s(processes), time.perf_counter()
                await asyncio.sleep(arguments.seconds)
                tokens, seconds = load.tokens - tokens, time.perf_counter() - begun
                found[watched] = Window(tokens / seconds, 1000 * (cpu_s(processes) - cpu) / max(1, tokens))
                if watchers is not None:
                    await watchers.end()
            pairs.append((found[True], found[False]))
            print(f"pair {number + 1}: {pairs[-1]}", file=sys.stderr, flush=True)
        await load.end()
    return pairs


async def tell_costs(session: aiohttp.ClientSession, url: str, processes: list[psutil.Process]) -> None:
    """Prints what each look costs a server without other work, after as many requests as it remembers."""
    for number in range(REMEMBERED):
        body = {"prompt": [number], "max_tokens": 2}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
    for path in ("/fleet?since=0", "/fleet", "/requests?limit=100", "/metrics"):
        cpu = cpu_s(processes)
        for _ in range(ASKED):
            async with session.get(url + path) as answer:
                size = len(await answer.read())
        print(f"{path}: {1000 * (cpu_s(processes) - cpu) / ASKED:.2f} ms of CPU, {size} bytes", flush=True)
    cpu = cpu_s(processes)
    await asyncio.sleep(IDLE_S)
    print(f"idle: {100 * (cpu_s(processes) - cpu) / IDLE_S:.2f} % of a core", flush=True)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def summary(pairs: list[tuple[Window, Window]], seed: int) -> dict[str, dict[str, float]]:
    """The medians of each figure, and what being watched changes, in percent, with its 95 % interval."""
    found = {}
    for name in ("tokens", "cpu_ms"):
        values = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        draw = random.Random(seed)
        means = sorted(change(draw.choices(values, k=len(values))) for _ in range(2000))
        found[name] = {
            "watched": statistics.median(a for a, _ in values),
            "alone": statistics.median(b for _, b in values),
            "change_percent": change(values),
            "low": means[50],
            "high": means[-51],
        }
    return found


def change(values: list[tuple[float, float]]) -> float:
    """The median of the pairs' ratios, in percent, as others may have had the machine in some window."""
    return 100 * (statistics.median(a / b for a, b in values) - 1)


@contextlib.asynccontextmanager
async def running(
    workers: int, model: str, shape: str | None, folder: Path
) -> AsyncIterator[tuple[str, list[int]]]:
    """The URL and the processes of a server (no workers), or of a router and its workers."""
    if not workers:
        options = SMALL
        if shape is not None:
            model, options = write_model(str(folder), shape), RANDOM
        serve = Serve(folder, model, *options, "--log-requests", "off")
        try:
            await asyncio.to_thread(serve.ready)
            yield f"http://127.0.0.1:{serve.port}", [serve.process.pid]
        finally:
            serve.stop()
        return
    with Processes(folder) as fleet:
        fleet.route("--log-requests", "off")
        for number in range(workers):
            fleet.serve(f"w{number}", "--log-requests", "off", model=model)
        for number in range(workers):
            await asyncio.to_thread(fleet.wait_state, f"w{number}", "ready")
        yield f"http://127.0.0.1:{fleet.port}", [process.pid for process in fleet.running.values()]


async def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running(arguments.workers, arguments.model, arguments.shape, Path(folder)) as (url, pids):
            pairs = await measure(url, pids, arguments)
    found = summary(pairs, arguments.seed)
    for name, one in found.items():
        print(
            f"{name}: {one['watched']:.3f} watched, {one['alone']:.3f} alone, "
            f"{one['change_percent']:+.2f} % ({one['low']:+.2f} to {one['high']:+.2f})"
        )
    if arguments.json is not None:
        cores = psutil.cpu_count()
        about = {"machine": f"{platform.machine()}, {cores} cores", "workers": arguments.workers}
        about |= {"streams": arguments.streams, "pairs": arguments.pairs, "seconds": arguments.seconds}
        arguments.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="of workloads.py, in place of a model: on a GPU, one server alone")
    parser.add_argument("--workers", type=int, default=0, help="behind a router; 0: one server alone")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))
