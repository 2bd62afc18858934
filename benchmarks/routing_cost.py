"""Cost of a router: the latency that it adds, its CPU time for each request and each streamed token, beside
other routers in one run.

    python benchmarks/routing_cost.py [--peers ENVIRONMENT] [--model FOLDER] [--only NAME ...] [--json FILE]
        [--rate 100] [--requests 1000] [--tokens 65] [--processes 1]

Every router stands before the same workers, which do no work: the first token comes after a fixed time, and
the others in steps, as an engine's do. The rest of the time to a first token is the router's. Proxies
(and Shoal's router with external workers) get workers that speak OpenAI's API; Shoal's router with native
workers, and Dynamo's frontend with its mocker, speak their own protocols. The mocker has a pace of its own,
so its first token includes the mocker's time.

Prompts are token ids: 3,000 that many requests share, and 1,000 of their own. Two routers refuse token ids
and get as many words. Each router runs alone, on one core; workers and clients share the others. The CPU time
per request is measured with answers of one token; the CPU time per token is the difference to answers of many
tokens, divided by their number. Work without requests (probes, leases, reports) is measured before and
subtracted from both. CPU time is read from /proc, for the router's process and its children.

`--peers`: a virtual environment with `vllm-router`, `sglang-router`, `smg`, `ai-dynamo` and
`ai-dynamo-runtime` in it, or some of them. `--model`: a folder with a tokenizer, for Dynamo and for native
workers, which have SmolLM2's without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
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
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.api import FinishReason, Output, Request
from shoal.collector import Collector
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.native.membership import member_of
from shoal.fleet.native.worker_server import WorkerServer
from shoal.fleet.registry.open import open_registry
from shoal.model_card import ModelCard
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.wire import ModelInfo

MODEL = "bench"
VOCAB_SIZE = 49_152
NUM_WORKERS = 16
CONTEXTS, SHARED, OWN = 48, 3000, 1000  # prompts: how many beginnings, and tokens of each part
FIRST_S, TOKEN_S = 0.02, 0.02  # the pace of workers: to the first token, and between tokens
START_S = 120.0
WORD = 28  # any token of the model
ALL_CORES = os.sched_getaffinity(0)
T = TypeVar("T")


def free_ports(count: int) -> list[int]:
    """Different ones, as all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


# Workers that do nothing


class Steps:
    """The pace of one worker. A request's first token comes FIRST_S after the request. The others come in
    steps, one token for each request that runs. `give` returns whether there are more."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: list[Callable[[], bool]] = []
        self._due = self._loop.time() + random.uniform(0, TOKEN_S)
        self._step()

    def add(self, give: Callable[[], bool]) -> None:
        self._loop.call_later(FIRST_S, self._begin, give)

    def _begin(self, give: Callable[[], bool]) -> None:
        if give():
            self._running.append(give)

    def _step(self) -> None:
        self._running = [give for give in self._running if give()]
        self._due += TOKEN_S
        self._loop.call_at(self._due, self._step)


class Worker(asyncio.Protocol):
    """One connection to a worker that speaks OpenAI's API. Answers its requests one after the other."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.data = b""
        self.length = -1

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
            self.complete(json.loads(body))
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

    def complete(self, request: dict[str, Any]) -> None:
        count, with_ids = request["max_tokens"], request.get("return_token_ids")
        if not request.get("stream"):
            self.whole({"id": "x", "object": "text_completion", "model": MODEL, "choices": [_choice()]})
            return
        numbers = iter(range(count))

        def give() -> bool:
            number = next(numbers)
            is_last = number == count - 1
            choice = _choice("length" if is_last else None)
            if with_ids:
                choice["token_ids"] = [number]
            head = {"id": "x", "object": "text_completion", "created": 1, "model": MODEL}
            pieces = _piece(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
            if number == 0:
                pieces = STREAM_HEAD + pieces
            if is_last:
                pieces += _piece(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self.transport.write(pieces)
            return not is_last and not self.transport.is_closing()

        self.steps.add(give)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _choice(finish: str | None = "length") -> dict[str, Any]:
    return {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish}


async def serve_workers(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        steps = Steps()
        await loop.create_server(functools.partial(Worker, steps), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


class SteppingEngine(FakeEngine):
    """A native engine with the same pace."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.steps = Steps()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        collector, count = Collector(), request.params.max_tokens or 1
        numbers = iter(range(count))
        has_left = False

        def give() -> bool:
            number = next(numbers)
            is_last = number == count - 1
            reason = FinishReason.LENGTH if is_last else None
            collector.put(Output(request.request_id, [WORD], finish_reason=reason))
            return not is_last and not has_left

        self.steps.add(give)
        try:
            while True:
                output = await collector.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            has_left = True


async def serve_own_workers(url: str, model: str, first: int, count: int) -> None:
    registry = open_registry(url)
    card = ModelCard(
        info=ModelInfo(
            model, os.getpid(), 32768, VOCAB_SIZE, 576, (), {}, 100_000, 1_600_000, 16, 256, "cpu", "float32"
        ),
        names=[MODEL],
        model=model,
        eos_token_ids=(2,),
    )
    for number in range(first, first + count):
        port = WorkerServer.open(
            f"worker-{number}",
            SteppingEngine(),
            Admission(256, 1024),
            ModelMetrics(MODEL, 32768, {}),
            LoopClock(),
        )
        member = member_of(f"worker-{number}", "both", "http://127.0.0.1:1", port.address, card)
        await registry.register(member)
    await asyncio.Event().wait()


# Routers


@dataclass
class Setting:
    """Programs and limits with which a router is started."""

    peers: Path | None
    model: Path | None
    port: int
    worker_ports: list[int]
    folder: Path
    processes: int
    uvloop: bool = False

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.worker_ports]

    def peer(self, name: str) -> str:
        assert self.peers is not None
        return str(self.peers / "bin" / name)


Started = tuple[list[str], list[list[str]], dict[str, str]]  # router, helpers beside it, environment


ON_UVLOOP = "import sys, uvloop; uvloop.install(); from shoal.cli.main import main; sys.exit(main())"


def our_router(setting: Setting) -> list[str]:
    program = ["-c", ON_UVLOOP] if setting.uvloop else ["-m", "shoal"]
    return [sys.executable, *program, "route", "--port", str(setting.port), "--policy", "kv"]


def ours_foreign(setting: Setting) -> Started:
    workers = [part for url in setting.urls for part in ("--worker", url)]
    return [*our_router(setting), *workers], [], {}


def ours(setting: Setting) -> Started:
    plane = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    share = NUM_WORKERS // setting.processes
    own = [
        [
            sys.executable,
            __file__,
            "--serve-own",
            plane,
            str(setting.model or "smollm2"),
            str(first),
            str(share),
        ]
        for first in range(0, NUM_WORKERS, share)
    ]
    return [*our_router(setting), "--plane", plane], own, {}


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
    command: list[str], cores: set[int], log: Path, environment: dict[str, str]
) -> Iterator[psutil.Process]:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
    environment = {**os.environ, **own, **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
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


def made_up_prompts(seed: str, count: int, *, as_text: bool = False) -> list[bytes]:
    """The prompts as JSON, so that the client has little to do. `as_text`: a word stands for each token.
    `seed`: all have the same beginnings."""
    names = [f"w{token}" if as_text else str(token) for token in range(1000, 30_000)]
    between = " " if as_text else ", "
    rng = random.Random(0)
    contexts = [between.join(rng.choices(names, k=SHARED)) for _ in range(CONTEXTS)]
    rng = random.Random(seed)
    prompts = [between.join((rng.choice(contexts), *rng.choices(names, k=OWN))) for _ in range(count)]
    return [(f'"{prompt}"' if as_text else f"[{prompt}]").encode() for prompt in prompts]


class Client(asyncio.Protocol):
    """One connection to a router. Asks for one answer at a time."""

    def __init__(self, idle: list[Client]) -> None:
        self.idle = idle
        self.done: asyncio.Future[float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def ask(self, request: bytes) -> asyncio.Future[float]:
        """Gives the seconds to the first token, when the answer is whole."""
        self.done = asyncio.get_running_loop().create_future()
        self.start, self.first, self.data, self.has_status = time.perf_counter(), None, b"", False
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if self.done is None or self.done.done():
            return
        if not self.has_status:
            self.has_status = True
            if data[9:12] != b"200":
                self.done.set_exception(RuntimeError(repr(data[:300])))
                return
        if self.first is None and b'"text":' in data:
            self.first = time.perf_counter() - self.start
        self.data = (self.data + data)[-100:]
        if self.data.endswith(b"0\r\n\r\n"):
            if self.first is None or b"[DONE]" not in self.data:
                self.done.set_exception(RuntimeError(f"an answer that is not whole: {self.data!r}"))
            else:
                self.done.set_result(self.first)
                self.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self.idle:
            self.idle.remove(self)
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError(f"the connection broke: {error}"))


class Clients:
    """The connections to one port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[Client] = []

    async def ask(self, prompt: bytes, num_tokens: int) -> float:
        """Returns the seconds to the first token."""
        body = b'{"model": "%b", "prompt": %b, "max_tokens": %d, "stream": true, "ignore_eos": true}' % (
            MODEL.encode(),
            prompt,
            num_tokens,
        )
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        if self.idle:
            client = self.idle.pop()
        else:
            make = functools.partial(Client, self.idle)
            _, client = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self.port)
        return await client.ask(request)

    def close(self) -> None:
        for client in list(self.idle):
            client.transport.close()


async def load(port: int, prompts: list[bytes], rate: float, num_tokens: int, seed: str) -> list[float]:
    """Requests at random times, `rate` a second; the seconds to the first token of each, counted from when
    it was due."""
    rng, clients = random.Random(seed), Clients(port)

    async def ask(prompt: bytes, due: float) -> float:
        late = time.perf_counter() - due
        return late + await clients.ask(prompt, num_tokens)

    due, tasks = time.perf_counter(), []
    for prompt in prompts:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(prompt, due)))
    async with asyncio.timeout(120):
        seconds = await asyncio.gather(*tasks)
    clients.close()
    return seconds


async def load_apart(setting: Setting, work: Sequence[str]) -> list[float]:
    """The same, by processes of its own. `work`: rate, number of requests, tokens, seed, "text" or "ids"."""
    rate, requests, tokens, seed, kind = work
    count = setting.processes
    clients = []
    for number in range(count):
        share = [str(float(rate) / count), str(int(requests) // count), tokens, f"{seed}-{number}", kind]
        command = [sys.executable, __file__, "--load", str(setting.port), *share]
        clients.append(
            await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
    for client in clients:
        assert client.stdout is not None
        await client.stdout.readline()  # it has made its prompts
    answers = await asyncio.gather(*[client.communicate(b"\n") for client in clients])
    if any(client.returncode for client in clients):
        raise RuntimeError("a client failed; what it says is above")
    return [seconds for out, _ in answers for seconds in json.loads(out)]


def be_client(port: str, rate: str, requests: str, tokens: str, seed: str, kind: str) -> None:
    prompts = made_up_prompts(seed, int(requests), as_text=kind == "text")
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(run_loop(load(int(port), prompts, float(rate), int(tokens), seed))))


async def until_ready(port: int, prompt: bytes, process: psutil.Process, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            async with asyncio.timeout(5):
                await Clients(port).ask(prompt, 1)
            return
        except (RuntimeError, OSError, TimeoutError) as error:
            if time.monotonic() > deadline or not process.is_running():
                raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from None
            await asyncio.sleep(0.5)


async def measure(name: str, setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    command, helpers, environment = ROUTERS[name](setting)
    log = setting.folder / "router.log"
    router_core, others = cores()
    kind = "text" if name in TEXT_ONLY else "ids"
    with contextlib.ExitStack() as stack:
        for number, helper in enumerate(helpers):
            stack.enter_context(running(helper, others, setting.folder / f"helper{number}.log", environment))
        process = stack.enter_context(running(command, router_core, log, environment))
        await until_ready(setting.port, made_up_prompts("", 1, as_text=kind == "text")[0], process, log)
        await load_apart(setting, (str(given.rate), str(given.warm_up), "1", "w", kind))
        before = cpu_seconds(process)
        await asyncio.sleep(given.idle)
        idle = (cpu_seconds(process) - before) / given.idle
        costs, seconds = [], []
        for num_tokens in (1, given.tokens):
            is_long = num_tokens > 1
            rate = given.token_rate if is_long else given.rate
            count = given.requests // 4 if is_long else given.requests
            before, start = cpu_seconds(process), time.perf_counter()
            seconds.append(
                await load_apart(setting, (str(rate), str(count), str(num_tokens), f"{given.seed}", kind))
            )
            spent = cpu_seconds(process) - before - idle * (time.perf_counter() - start)
            costs.append(spent / len(seconds[-1]))
    return {
        "router": name,
        "idle_cpu_share": idle,
        "request_cpu_us": costs[0] * 1e6,
        "token_cpu_us": (costs[1] - costs[0]) / (given.tokens - 1) * 1e6,
        **first_tokens(seconds[0]),
    }


def first_tokens(seconds: list[float]) -> dict[str, float]:
    """Returns the latency that is added to the worker's own time, in ms, by percentile."""
    parts = statistics.quantiles(seconds, n=100)
    return {f"added_p{part}_ms": (parts[part - 1] - FIRST_S) * 1e3 for part in (50, 99)}


def cores() -> tuple[set[int], set[int]]:
    """Returns the router's core and the cores of all others."""
    first, *others = sorted(ALL_CORES)
    return {first}, set(others)


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    _, others = cores()
    os.sched_setaffinity(0, others)
    rows = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        *ports, router_port = free_ports(NUM_WORKERS + 1)
        share = NUM_WORKERS // given.processes
        log = folder / "workers.log"
        for first in range(0, NUM_WORKERS, share):
            serve = [sys.executable, __file__, "--serve-workers", *map(str, ports[first : first + share])]
            workers = stack.enter_context(running(serve, others, log, {}))
            await until_ready(ports[first], b"[1, 2, 3]", workers, log)
        direct = Setting(None, None, ports[0], ports, folder, given.processes)
        work = (str(given.rate / NUM_WORKERS), str(given.requests // NUM_WORKERS), "1", "d", "ids")
        rows.append({"router": "none", **first_tokens(await load_apart(direct, work))})
        for router in given.only or ROUTERS:
            setting = Setting(
                given.peers, given.model, router_port, ports, folder, given.processes, given.uvloop
            )
            try:
                rows.append(await measure(router, setting, given))
            except (RuntimeError, AssertionError, OSError) as error:
                rows.append({"router": router, "error": f"{type(error).__name__}: {error}"})
            show(rows[-1:])
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "error" in row:
            print(f"| {row['router']} | did not run: {row['error'][-300:]!r} | | | | |", flush=True)
            continue
        costs = [f"{row[key]:.0f}" if key in row else "" for key in ("request_cpu_us", "token_cpu_us")]
        idle = f"{row['idle_cpu_share']:.1%}" if "idle_cpu_share" in row else ""
        print(
            f"| {row['router']} | {idle} | {costs[0]} | {costs[1]} | {row['added_p50_ms']:.1f} "
            f"| {row['added_p99_ms']:.1f} |",
            flush=True,
        )


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Workers and clients share few cores, so they run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(ROUTERS))
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--token-rate", type=float, help="the same, of long answers; a quarter of --rate")
    parser.add_argument("--requests", type=int, default=1000, help="a quarter of them for long answers")
    parser.add_argument("--warm-up", type=int, default=50, help="requests before all that is measured")
    parser.add_argument("--idle", type=float, default=8.0, help="seconds without requests")
    parser.add_argument("--tokens", type=int, default=65, help="of long answers")
    parser.add_argument("--processes", type=int, default=1, help="of clients, and of workers: 1, 2, 4, 8, 16")
    parser.add_argument("--uvloop", action="store_true", help="our router on this event loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve-workers", nargs="+", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-own", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_workers:
        return run_loop(serve_workers(given.serve_workers))
    if given.serve_own:
        url, model, first, count = given.serve_own
        return run_loop(serve_own_workers(url, model, int(first), int(count)))
    if given.load:
        return be_client(*given.load)
    given.token_rate = given.token_rate or given.rate / 4
    print("| router | CPU idle | CPU of a request, us | CPU of a token, us | added latency p50, ms | p99 |")
    print("|---|---|---|---|---|---|")
    rows = asyncio.run(run(given))
    if given.json is not None:
        about = {"python": platform.python_version(), "rate": given.rate, "requests": given.requests}
        given.json.write_text(json.dumps({**about, "tokens": given.tokens, "rows": rows}, indent=1))
    return None


if __name__ == "__main__":
    main()
