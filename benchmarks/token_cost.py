"""CPU time of a streamed token in the router and in a native worker, and in `shoal serve` up to the same
point.

    python benchmarks/token_cost.py [--streams 64] [--tokens 400]

A worker's port runs in a process of its own, before an engine whose every step gives each stream a token.
The router's end is RemoteEngine alone, then FleetEngine over it. Beside them the same outputs are read as
`shoal serve` reads them from its engine's core. HTTP and text come on top of each, and what the timeline of
a request keeps of each token. CPU time of the process, by token.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.api import FinishReason, Output, Request
from shoal.collector import Collector
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.native.fleet_engine import FleetEngine
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.native.worker_server import WorkerServer
from shoal.fleet.routing.dispatcher import Dispatcher
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.model_card import ModelCard
from shoal.sampling_params import SamplingParams
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.telemetry.timeline import Timeline
from shoal.wire import ModelInfo, Outputs, decode_from_core, encode

STEP_S = 0.01
INFO = ModelInfo("fake", 1, 4096, 512, 64, (2,), {}, 1024, 16_384, 16, 4096, "cpu", "float32")
CARD = ModelCard(info=INFO, names=["fake"], model="fake", eos_token_ids=(2,))


async def read(outputs: AsyncGenerator[Output, None]) -> int:
    return sum([len(output.token_ids) async for output in outputs])


async def drain(collector: Collector) -> AsyncGenerator[Output, None]:
    has_ended = False
    while not has_ended:
        output = await collector.get()
        has_ended = output.finish_reason is not None
        yield output


def step(number: int, tokens: int, names: list[str]) -> list[Output]:
    reason = FinishReason.LENGTH if number == tokens - 1 else None
    return [Output(name, [number], finish_reason=reason) for name in names]


async def worker(streams: int, tokens: int) -> None:
    """Serves until it is ended, and reports the cost of each round."""
    engine, collectors = FakeEngine(vocab_size=512), dict[str, Collector]()

    async def generate(request: Request) -> AsyncGenerator[Output, None]:
        collectors[request.request_id] = Collector()
        async for output in drain(collectors[request.request_id]):
            yield output

    engine.generate = generate  # type: ignore[method-assign]
    port = WorkerServer.open("w", engine, Admission(1 << 20, 0), ModelMetrics("fake", 4096, {}), LoopClock())
    print(port.address, flush=True)
    while True:
        while len(collectors) < streams:
            await asyncio.sleep(STEP_S)
        names, started = list(collectors), time.process_time()
        for number in range(tokens):
            for output in step(number, tokens, names):
                collectors[output.request_id].put(output)
            await asyncio.sleep(STEP_S)
        for name in names:
            del collectors[name]
        show("the worker's port", started, streams * tokens)


def show(what: str, started: float, count: int) -> None:
    print(f"{what:32} {(time.process_time() - started) / count * 1e6:6.2f} us a token", file=sys.stderr)


async def router(address: str, streams: int, tokens: int) -> None:
    link = RemoteEngine(WorkerInfo(id="w", url=address, models=("fake",)), CARD, address, None)
    await link.check()
    clock = LoopClock()
    books = KvRouter(KvIndexer(16), clock=clock.now)
    dispatcher: Dispatcher[RemoteEngine] = Dispatcher(books, max_queued=0, clock=clock)
    member = Worker(link.info, link, clock.now)
    member.reached()
    dispatcher.add(member)
    fleet = FleetEngine(dispatcher, migration_limit=3)
    for what, engine in [("RemoteEngine", link), ("FleetEngine", fleet)] * 2:
        started = time.process_time()
        asked = [
            Request(f"{what}-{started}-{i}", [1, 2, 3, 4], SamplingParams(max_tokens=tokens))
            for i in range(streams)
        ]
        counts = await asyncio.gather(*[read(engine.generate(one)) for one in asked])
        assert sum(counts) == streams * tokens
        show(what, started, streams * tokens)
    await link.close()


async def server(streams: int, tokens: int) -> None:
    collectors = {f"cmpl-{i}": Collector() for i in range(streams)}
    steps = [encode(Outputs(step(number, tokens, list(collectors)))) for number in range(tokens)]
    readers = [asyncio.create_task(read(drain(collector))) for collector in collectors.values()]
    started = time.process_time()
    for data in steps:
        for output in decode_from_core(data).outputs:  # type: ignore[union-attr]
            collectors[output.request_id].put(output)
        await asyncio.sleep(STEP_S)
    assert sum(await asyncio.gather(*readers)) == streams * tokens
    show("shoal serve, from its core", started, streams * tokens)


def timelines(streams: int, tokens: int) -> None:
    """Measures what a server and a router record about each token."""
    output, now = Output("r", [1]), time.perf_counter()
    answers = [Timeline("r", "fake", "/v1/completions", now).answer() for _ in range(streams)]
    started = time.process_time()
    for _ in range(tokens):
        for answer in answers:
            answer.push(output, now)
    show("a timeline", started, streams * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.streams, options.tokens)
    if options.worker:
        asyncio.run(worker(*sizes))
    command = [sys.executable, __file__, "--worker", "--streams", str(sizes[0]), "--tokens", str(sizes[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        asyncio.run(router(process.stdout.readline().strip(), *sizes))
        process.kill()
    asyncio.run(server(*sizes))
    timelines(*sizes)


if __name__ == "__main__":
    main()
