"""CPU time of a request to a native worker in the router, without sockets: the same code, from the bytes
that a client sends to the bytes that it gets, in one process.

    python benchmarks/request_cost.py [--requests 600] [--tokens 4000] [--model FOLDER]

CPU times of routing_cost.py differ by half between runs on a machine with other work. Here each part of a
request is timed some hundred times, and the tenth percentile is reported, which other work changes least.
The parts: from a request's bytes to the message to its worker; from the message with its first token to the
client; one token more; the last token and the end. "warm" is one request after the other; for "cold" the
processor's caches are used for something else before each part, as they are in a router that waits most of
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from uvicorn.server import ServerState

from shoal.api import FinishReason, Output
from shoal.config import ServerConfig
from shoal.fleet.clock import LoopClock
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.native.fleet_engine import FleetEngine
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.native.worker_wire import decode_to_worker, encode
from shoal.fleet.routing.dispatcher import Dispatcher
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.model_card import ModelCard
from shoal.server.app import Server
from shoal.server.http.connection import Connections
from shoal.server.http.request_log import RefusalLog
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.run import _settings
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import served_model
from shoal.telemetry.logs import set_up
from shoal.text.tokenizer import load_tokenizer
from shoal.weights.source import resolve
from shoal.wire import Add, ModelInfo, Outputs

NUM_WORKERS = 16
SHARED_SHARE = 0.75  # the part of a prompt that is one of CONTEXTS beginnings
CONTEXTS = 48
CACHE_BYTES = 64 << 20  # read between cold requests
WORD = 28
PASSES = 12  # After 12 passes the event loop has nothing left to do. The time of idle passes is subtracted.
PARTS = ("begin", "first token", "token", "end")


class Wire:
    """In place of a worker's ZMQ socket: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int) -> None:
        self.sent.append(data)


class Client(asyncio.Transport):
    """In place of a client's connection: keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


class Site:
    """A router's parts, put together as `shoal route` does."""

    def __init__(self, model: str) -> None:
        clock = LoopClock()
        info = ModelInfo(
            model, 1, 32768, 49_152, 576, (2,), {}, 100_000, 1_600_000, 16, 256, "cpu", "float32"
        )
        card = ModelCard(info=info, names=["bench"], model=model, eos_token_ids=(2,))
        router = KvRouter(KvIndexer(16), clock=clock.now, seed=0)
        dispatcher: Dispatcher[RemoteEngine] = Dispatcher(router, max_queued=100, clock=clock)
        self.links: list[tuple[RemoteEngine, Wire]] = []
        for number in range(NUM_WORKERS):
            about = WorkerInfo(
                id=f"worker-{number}", url="http://127.0.0.1:1", models=("bench",), max_running=256
            )
            link, wire = RemoteEngine(about, card, "tcp://127.0.0.1:1", None), Wire()
            link._socket, link._is_connected = wire, True  # type: ignore[assignment]
            link._reader.poll = lambda: None  # type: ignore[method-assign]
            worker = Worker(about, link, clock.now)
            worker.has_events = True
            worker.reached()
            link.on_outputs = worker.delivered
            dispatcher.add(worker)
            self.links.append((link, wire))
        config = ServerConfig()
        files = resolve(card.model, card.revision, card.download_dir)
        engine = FleetEngine(dispatcher, migration_limit=3)
        served = served_model(card, engine, load_tokenizer(files, None, None), config)
        app = Server(Catalog([served]), config, described(PUBLIC_ROUTES))
        settings = _settings(app, config, Connections(100, RefusalLog("off")))
        settings.load()
        self.router = router
        self.connection = settings.http_protocol_class(  # type: ignore[call-arg]
            config=settings, server_state=ServerState(), app_state={}
        )
        self.client = Client()
        self.connection.connection_made(self.client)

    async def ask(self, body: bytes, is_cold: bool) -> tuple[float, ...]:
        """Returns the seconds of each part."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        self.client.written = b""
        seconds = [await self.timed(lambda: self.connection.data_received(request), is_cold)]
        link, wire = next((link, wire) for link, wire in self.links if wire.sent)
        [add] = map(decode_to_worker, wire.sent)
        wire.sent.clear()
        assert isinstance(add, Add)
        for number in range(3):
            reason = FinishReason.LENGTH if number == 2 else None
            message = [encode(Outputs([Output(add.request.request_id, [WORD], finish_reason=reason)]))]
            before = len(self.client.written)
            seconds.append(await self.timed(lambda message=message: link._take(message), is_cold))
            assert len(self.client.written) > before
        assert self.client.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        return tuple(seconds)

    async def timed(self, begin: Any, is_cold: bool) -> float:
        """Returns the seconds that the event loop works on `begin` and all that follows it."""
        if is_cold:
            SWEPT.sum()
        started = time.thread_time()
        begin()
        for _ in range(PASSES):
            await asyncio.sleep(0)
        return time.thread_time() - started


def least(seconds: Sequence[float]) -> float:
    """The tenth percentile."""
    return statistics.quantiles(seconds, n=10)[0]


SWEPT = np.zeros(CACHE_BYTES // 8)


def made_up_bodies(count: int, tokens: int) -> list[bytes]:
    rng = random.Random(0)
    shared = int(tokens * SHARED_SHARE)
    contexts = [[rng.randrange(1000, 30_000) for _ in range(shared)] for _ in range(CONTEXTS)]
    found = []
    for _ in range(count):
        own = [rng.randrange(1000, 30_000) for _ in range(tokens - shared)]
        found.append(
            b'{"model": "bench", "prompt": %b, "max_tokens": 3, "stream": true, "ignore_eos": true}'
            % str(rng.choice(contexts) + own).encode()
        )
    return found


async def measure(given: argparse.Namespace) -> None:
    site = Site(given.model)
    for kind in ("warm", "cold"):
        bodies = made_up_bodies(given.requests, given.tokens)
        rows = [await site.ask(body, kind == "cold") for body in bodies]
        idle = [await site.timed(lambda: None, kind == "cold") for _ in bodies]
        parts = [(least(column) - least(idle)) * 1e6 for column in zip(*rows[len(rows) // 4 :])]
        print(f"| {kind} | " + " | ".join(f"{part:.1f}" for part in parts) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=4000, help="of each prompt")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    given = parser.parse_args()
    with Path("/dev/null").open("w") as nowhere:
        set_up(logging.INFO, "text", nowhere)
        print("| caches | " + " | ".join(f"{part}, us" for part in PARTS) + " |")
        print("|---" * (1 + len(PARTS)) + "|")
        asyncio.run(measure(given))


if __name__ == "__main__":
    main()
