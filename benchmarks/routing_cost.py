"""What a router costs: latency that it adds, its CPU time for each request and each streamed token, beside
other routers in one run.

    python benchmarks/routing_cost.py [--peers ENVIRONMENT] [--model FOLDER] [--only NAME ...] [--json FILE]

Every router stands before the same workers, which do no work: they stream tokens at a fixed pace, so that all
time beyond that pace is the router's. Proxies (and our router with foreign workers) get workers that speak
OpenAI's API; our router with our workers, and Dynamo's frontend with its mocker, speak their own protocols.
Prompts are token ids: 3,000 that many requests share, and 1,000 of their own. Two routers refuse
token ids and get as many words. Each router runs alone, on one
core; workers and clients share another. The CPU time of a request is that of answers of one token; that of a
token is the difference to answers of many, divided by their number. What a router does without requests
(probes, leases, reports) is measured before, and taken off both.

`--peers`: a virtual environment with `vllm-router`, `sglang-router`, `smg`, `ai-dynamo` and
`ai-dynamo-runtime` in it, or some of them. `--model`: a folder with a tokenizer, for Dynamo.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fake import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.plane_workers import member_of
from shoal.fleet.planes import open_plane
from shoal.fleet.worker_port import WorkerPort
from shoal.metrics import ModelMetrics
from shoal.model_card import ModelCard
from shoal.server.admission import Admission
from shoal.wire import ModelInfo

MODEL = "bench"
VOCAB_SIZE = 49_152
NUM_WORKERS = 16
CONTEXTS, SHARED, OWN = 48, 3000, 1000  # prompts: how many beginnings, and tokens of each part
FIRST_S, TOKEN_S = 0.02, 0.02  # the pace of workers: to the first token, and between tokens
START_S = 120.0
IDLE_S = 8.0


def free_ports(count: int) -> list[int]:
    """Different ones, as all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


# Workers that speak OpenAI's API and do nothing


class Worker(asyncio.Protocol):
    """Reads requests of one connection, one after the other, and streams tokens."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.data = b""
        self.length = -1
        self.streaming: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.data += data
        while True:
            if self.length < 0:
                head, end, rest = self.data.partition(b"\r\n\r\n")
                if not end:
                    return
                self.line, *lines = head.split(b"\r\n")
                self.length = 0
                for line in lines:
                    if line[:15].lower() == b"content-length:":
                        self.length = int(line[15:])
                self.data = rest
            if len(self.data) < self.length:
                return
            body, self.data = self.data[: self.length], self.data[self.length :]
            self.length = -1
            self.answer(self.line.split(b" ")[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        if path.startswith(b"/v1/completions"):
            request = json.loads(body)
            self.streaming = asyncio.get_running_loop().create_task(self.stream(request))
        elif path.startswith(b"/v1/models"):
            self.whole({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]})
        elif b"info" in path:
            self.whole({"model_path": MODEL, "model_id": MODEL, "is_generation": True})
        elif path.startswith(b"/metrics"):
            self.whole({})
        else:
            self.whole({"status": "ok"})

    def whole(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    async def stream(self, request: dict[str, Any]) -> None:
        count, with_ids = request["max_tokens"], request.get("return_token_ids")
        if not request.get("stream"):
            self.whole({"id": "x", "object": "text_completion", "model": MODEL, "choices": [_choice()]})
            return
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        start = time.perf_counter() + FIRST_S
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number * TOKEN_S - time.perf_counter()))
            choice = _choice("length" if number == count - 1 else None)
            if with_ids:
                choice["token_ids"] = [number]
            chunk = {
                "id": "x",
                "object": "text_completion",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
            self.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.send(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    def send(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _choice(finish: str | None = "length") -> dict[str, Any]:
    return {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish}


async def serve_workers(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Worker, "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


async def serve_own_workers(url: str) -> None:
    """Workers of ours around engines that do nothing."""
    plane = open_plane(url)
    card = ModelCard(
        info=ModelInfo(
            "smollm2", os.getpid(), 32768, VOCAB_SIZE, 576, (), {}, 100_000, 16, 256, "cpu", "float32"
        ),
        names=[MODEL],
        model="smollm2",
        eos_token_ids=(2,),
    )
    for number in range(NUM_WORKERS):
        engine = FakeEngine(VOCAB_SIZE, prefill_seconds=FIRST_S, token_seconds=TOKEN_S)
        port = WorkerPort.open(
            f"worker-{number}", engine, Admission(256, 1024), ModelMetrics(MODEL, 32768, {}), LoopClock()
        )
        await plane.register(member_of(f"worker-{number}", "both", "http://127.0.0.1:1", port.address, card))
    await asyncio.Event().wait()


# Routers


@dataclass
class Setting:
    """What a router is started with."""

    peers: Path | None
    model: Path | None
    port: int
    worker_ports: list[int]
    folder: Path

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.worker_ports]

    def peer(self, name: str) -> str:
        assert self.peers is not None
        return str(self.peers / "bin" / name)


Started = tuple[list[str], list[list[str]], dict[str, str]]  # router, helpers beside it, environment


def ours_foreign(setting: Setting) -> Started:
    workers = [part for url in setting.urls for part in ("--worker", url)]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "route",
        "--port",
        str(setting.port),
        "--policy",
        "kv",
        *workers,
    ]
    return command, [], {}


def ours(setting: Setting) -> Started:
    plane = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "shoal", "route", "--port", str(setting.port), "--policy", "kv"]
    own = [sys.executable, __file__, "--serve-own", plane]
    return [*command, "--plane", plane], [own], {}


def vllm_router(setting: Setting) -> Started:
    command = [setting.peer("vllm-router"), "--host", "127.0.0.1", "--port", str(setting.port)]
    return [*command, "--policy", "cache_aware", "--worker-urls", *setting.urls], [], {}


def sglang_router(setting: Setting) -> Started:
    command = [setting.peer("sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(setting.port)]
    return [*command, "--policy", "cache_aware", "--worker-urls", *setting.urls], [], {}


def smg(setting: Setting) -> Started:
    command = [setting.peer("smg"), "launch", "--host", "127.0.0.1", "--port", str(setting.port)]
    return [*command, "--policy", "cache_aware", "--worker-urls", *setting.urls], [], {}


def dynamo(setting: Setting) -> Started:
    python, store = setting.peer("python"), str(setting.folder / "store")
    frontend = [python, "-m", "dynamo.frontend", "--http-port", str(setting.port), "--router-mode", "kv"]
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(setting.model), "--model-name", MODEL]
    mocker += ["--num-workers", str(NUM_WORKERS), "--speedup-ratio", "1", "--block-size", "16"]
    return (
        [*frontend, "--discovery-backend", "file"],
        [[*mocker, "--discovery-backend", "file"]],
        {"DYN_FILE_KV": store},
    )


ROUTERS: dict[str, Callable[[Setting], Started]] = {
    "shoal, our workers": ours,
    "shoal, foreign workers": ours_foreign,
    "vllm-router": vllm_router,
    "sglang-router": sglang_router,
    "smg": smg,
    "dynamo": dynamo,
}


TEXT_ONLY = {"sglang-router", "smg"}  # these refuse token ids


@contextlib.contextmanager
def running(
    command: list[str], core: int, log: Path, environment: dict[str, str]
) -> Iterator[psutil.Process]:
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "RAYON_NUM_THREADS": "1"}
    environment = {**os.environ, **own, **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


# Load


def made_up_prompts(seed: int, count: int, *, as_text: bool = False) -> list[bytes]:
    """The prompts as JSON, so that the client has little to do. `as_text`: a word stands for
    each token."""
    rng = random.Random(seed)
    contexts = [[rng.randrange(1000, 30_000) for _ in range(SHARED)] for _ in range(CONTEXTS)]
    made = []
    for _ in range(count):
        prompt = [*rng.choice(contexts), *(rng.randrange(1000, 30_000) for _ in range(OWN))]
        text = " ".join(f"w{token}" for token in prompt)
        made.append(json.dumps(text if as_text else prompt).encode())
    return made


async def ask(session: aiohttp.ClientSession, url: str, prompt: bytes, num_tokens: int) -> float:
    """Returns the seconds to the first token."""
    body = b'{"model": "%b", "prompt": %b, "max_tokens": %d, "stream": true, "ignore_eos": true}'
    start, first, data = time.perf_counter(), None, b""
    async with session.post(
        url + "/v1/completions",
        data=body % (MODEL.encode(), prompt, num_tokens),
        headers={"content-type": "application/json"},
    ) as answer:
        async for chunk in answer.content.iter_any():
            if first is None:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {chunk[:300]!r}")
                if b'"text":' in chunk:
                    first = time.perf_counter() - start
            data = (data + chunk)[-100:]
    if first is None or b"[DONE]" not in data:
        raise RuntimeError(f"an answer that is not whole: {data!r}")
    return first


async def load(url: str, prompts: list[bytes], rate: float, num_tokens: int, seed: int) -> list[float]:
    """Requests at random times, `rate` a second; the seconds to the first token of each."""
    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = []
        due = time.perf_counter()
        for prompt in prompts:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, url, prompt, num_tokens)))
        return await asyncio.gather(*tasks)


async def until_ready(url: str, prompt: bytes, process: psutil.Process, log: Path) -> None:
    deadline = time.monotonic() + START_S
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                await ask(session, url, prompt, 1)
                return
            except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline or not process.is_running():
                    raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from None
                await asyncio.sleep(0.5)


async def measure(name: str, setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    command, helpers, environment = ROUTERS[name](setting)
    url, log = f"http://127.0.0.1:{setting.port}", setting.folder / "router.log"
    with contextlib.ExitStack() as stack:
        for number, helper in enumerate(helpers):
            stack.enter_context(running(helper, 1, setting.folder / f"helper{number}.log", environment))
        process = stack.enter_context(running(command, 0, log, environment))
        prompts = made_up_prompts(given.seed, given.requests, as_text=name in TEXT_ONLY)
        await until_ready(url, prompts[0], process, log)
        await load(url, prompts[:50], given.rate, 1, given.seed)
        before = cpu_seconds(process)
        await asyncio.sleep(IDLE_S)
        idle = (cpu_seconds(process) - before) / IDLE_S
        costs, seconds = [], []
        for num_tokens in (1, given.tokens):
            rate = given.rate if num_tokens == 1 else given.rate / 4
            before, start = cpu_seconds(process), time.perf_counter()
            seconds.append(await load(url, prompts, rate, num_tokens, given.seed))
            spent = cpu_seconds(process) - before - idle * (time.perf_counter() - start)
            costs.append(spent / len(prompts))
        first = statistics.quantiles(seconds[0], n=100)
    return {
        "router": name,
        "idle_cpu_share": idle,
        "request_cpu_us": costs[0] * 1e6,
        "token_cpu_us": (costs[1] - costs[0]) / (given.tokens - 1) * 1e6,
        "first_token_p50_ms": first[49] * 1e3,
        "first_token_p99_ms": first[98] * 1e3,
    }


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    os.sched_setaffinity(0, {1})
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        *ports, router_port = free_ports(NUM_WORKERS + 1)
        serve = [sys.executable, __file__, "--serve-workers", *map(str, ports)]
        with running(serve, 1, folder / "workers.log", {}) as workers:
            direct = f"http://127.0.0.1:{ports[0]}"
            await until_ready(direct, b"[1, 2, 3]", workers, folder / "workers.log")
            prompts = made_up_prompts(given.seed, given.requests)
            first = statistics.quantiles(await load(direct, prompts, given.rate, 1, given.seed), n=100)
            rows.append(
                {
                    "router": "none",
                    "first_token_p50_ms": first[49] * 1e3,
                    "first_token_p99_ms": first[98] * 1e3,
                }
            )
            for router in given.only or ROUTERS:
                setting = Setting(given.peers, given.model, router_port, ports, folder)
                try:
                    rows.append(await measure(router, setting, given))
                except (RuntimeError, aiohttp.ClientError, AssertionError, OSError) as error:
                    rows.append({"router": router, "error": f"{type(error).__name__}: {error}"})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| router | CPU idle | CPU of a request, us | CPU of a token, us | first token p50, ms | p99 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if "error" in row:
            print(f"| {row['router']} | did not run: {row['error'][:200]!r} | | | | |")
            continue
        costs = [f"{row[key]:.0f}" if key in row else "" for key in ("request_cpu_us", "token_cpu_us")]
        idle = f"{row['idle_cpu_share']:.1%}" if "idle_cpu_share" in row else ""
        print(
            f"| {row['router']} | {idle} | {costs[0]} | {costs[1]} | {row['first_token_p50_ms']:.1f} "
            f"| {row['first_token_p99_ms']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(ROUTERS))
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=65, help="of long answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve-workers", nargs="+", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-own", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_workers:
        asyncio.run(serve_workers(given.serve_workers))
        return
    if given.serve_own:
        asyncio.run(serve_own_workers(given.serve_own))
        return
    rows = asyncio.run(run(given))
    show(rows)
    if given.json is not None:
        about = {"python": platform.python_version(), "rate": given.rate, "requests": given.requests}
        given.json.write_text(json.dumps({**about, "tokens": given.tokens, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
