"""The speed of the front: streamed tokens a second of our server and of one that streams as vLLM's does, on
the same fake engine.

    python benchmarks/server.py                       # servers in turn, 256 streams at once
    python benchmarks/server.py --servers asyncio,fastapi --streams 64 --json result.json
    python benchmarks/server.py --profile asyncio     # where our server's time goes

Each server is one process on one core, with an engine that yields a token whenever it is asked, SmolLM2's
tokenizer and chat template. The client, in a process of its own on the other core, only counts `data:` lines
as they come: the server is what is measured. Servers take turns, so that a busy machine slows all of them:
believe the ratios, and those by the server's CPU seconds most. Beside Shoal this needs fastapi, granian,
orjson, psutil and uvloop.

`fastapi` streams a token as vLLM 0.24 does: an output object from the engine, a DecodeStream's text, three
pydantic models whose validators look for unknown fields, `model_dump_json(exclude_unset=True)`,
prometheus_client for each gap, and Starlette's StreamingResponse under CORS middleware.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import psutil

# the first two: our application under uvicorn, by event loop
SERVERS = ("asyncio", "uvloop", "granian", "fastapi")
START_SECONDS = 60
# vLLM's, of gaps
BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REPLY = (
    'The sea is wide and "deep"; its tides come and go.\n\n1. The moon pulls.\n2. The earth turns under '
    "it, day after day.\n"
)


# The servers: each function runs one until it is killed


def load_model():
    """Tokenizer and fake engine: the same for all."""
    from shoal.fake_engine import FakeEngine
    from shoal.text.tokenizer import load_tokenizer
    from shoal.weights.source import resolve

    tokenizer = load_tokenizer(resolve("smollm2"))
    return tokenizer, FakeEngine(len(tokenizer), reply=tokenizer.encode(REPLY, add_special_tokens=False))


def our_app():
    from shoal.config import ServerConfig
    from shoal.server.app import create_app
    from shoal.server.served.catalog import Catalog
    from shoal.server.served.model import LoadedModel, ServedModel

    tokenizer, engine = load_model()
    model = ServedModel(
        ["smollm2"],
        engine,
        LoadedModel(
            tokenizer,
            max_model_len=8192,
            vocab_size=len(tokenizer),
            eos_token_ids=tokenizer.eos_token_ids,
            max_num_seqs=1024,
        ),
    )
    return create_app(Catalog([model]), ServerConfig())


class GranianApp:
    """Our application, built when the loop runs, as ServedModel wants it. Granian imports it by name in its
    worker."""

    def __init__(self):
        self.app = None

    async def __call__(self, scope, receive, send):
        if self.app is None:
            self.app = our_app()
        await self.app(scope, receive, send)


granian_app = GranianApp()


async def serve_uvicorn(port: int) -> None:
    """As `shoal serve` does."""
    from shoal.config import ServerConfig
    from shoal.server.run import open_ports, serve

    config = ServerConfig(port=port)
    await serve(our_app(), None, config, open_ports(config))


def serve_uvloop(port: int) -> None:
    import uvloop

    uvloop.run(serve_uvicorn(port))


def serve_asyncio(port: int) -> None:
    asyncio.run(serve_uvicorn(port))


def serve_granian(port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    Granian(
        "server:granian_app",
        "127.0.0.1",
        port,
        interface=Interfaces.ASGINL,
        loop=Loops.uvloop,
        log_enabled=False,
    ).serve()


def serve_fastapi(port: int) -> None:
    import uvicorn

    uvicorn.run(
        fastapi_app(),
        host="127.0.0.1",
        port=port,
        http="httptools",
        loop="uvloop",
        log_level="warning",
        access_log=False,
    )


def fastapi_app():
    import logging
    import uuid
    from dataclasses import dataclass, field
    from typing import Any, ClassVar, Literal

    from fastapi import Depends, FastAPI, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import StreamingResponse
    from prometheus_client import Counter, Histogram
    from pydantic import BaseModel, ConfigDict, Field, model_validator
    from tokenizers.decoders import DecodeStream

    from shoal.api import Request as EngineRequest
    from shoal.sampling_params import SamplingParams

    logger = logging.getLogger("baseline")
    tokenizer, engine = load_model()

    class OpenAIModel(BaseModel):
        model_config = ConfigDict(extra="allow")
        field_names: ClassVar[set[str] | None] = None

        @model_validator(mode="wrap")
        @classmethod
        def log_extra_fields(cls, data, handler):
            result = handler(data)
            if not isinstance(data, dict):
                return result
            if cls.field_names is None:
                cls.field_names = set(cls.model_fields)
            if any(name not in cls.field_names for name in data):
                logger.warning("unknown fields: %s", data.keys() - cls.field_names)
            return result

    class StreamOptions(OpenAIModel):
        include_usage: bool | None = True
        continuous_usage_stats: bool | None = False

    class ChatRequest(OpenAIModel):
        messages: list[dict[str, Any]]
        model: str | None = None
        max_tokens: int | None = None
        temperature: float | None = None
        seed: int | None = None
        stream: bool | None = False
        stream_options: StreamOptions | None = None
        ignore_eos: bool = False

    class Usage(OpenAIModel):
        prompt_tokens: int = 0
        total_tokens: int = 0
        completion_tokens: int | None = 0

    class ToolCall(OpenAIModel):
        index: int
        id: str | None = None

    class DeltaMessage(OpenAIModel):
        role: str | None = None
        content: str | None = None
        reasoning: str | None = None
        tool_calls: list[ToolCall] = Field(default_factory=list)

    class StreamChoice(OpenAIModel):
        index: int
        delta: DeltaMessage
        logprobs: dict[str, Any] | None = None
        finish_reason: str | None = None
        stop_reason: int | str | None = None
        token_ids: list[int] | None = None

    class StreamResponse(OpenAIModel):
        id: str = Field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
        object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        created: int = Field(default_factory=lambda: int(time.time()))
        model: str
        choices: list[StreamChoice]
        usage: Usage | None = None
        prompt_token_ids: list[int] | None = None

    @dataclass
    class CompletionOutput:
        index: int
        text: str
        token_ids: list[int]
        cumulative_logprob: float | None
        logprobs: Any
        finish_reason: str | None = None
        stop_reason: int | str | None = None

    @dataclass
    class RequestOutput:
        request_id: str
        prompt_token_ids: list[int]
        outputs: list[CompletionOutput] = field(default_factory=list)
        finished: bool = False

    gaps = Histogram(
        "inter_token_latency_seconds", "Between tokens.", ["model_name"], buckets=BUCKETS
    ).labels("smollm2")
    generated = Counter("generation_tokens", "Tokens generated.", ["model_name"]).labels("smollm2")

    async def generate(request: EngineRequest) -> AsyncIterator[RequestOutput]:
        stream, backend = DecodeStream(skip_special_tokens=True), tokenizer._backend
        last = time.monotonic()
        async for out in engine.generate(request):
            now = time.monotonic()
            gaps.observe(now - last)
            generated.inc(len(out.token_ids))
            last = now
            text = "".join(stream.step(backend, token_id) or "" for token_id in out.token_ids)
            reason = None if out.finish_reason is None else str(out.finish_reason)
            yield RequestOutput(
                request.request_id,
                request.prompt_token_ids,
                [CompletionOutput(0, text, out.token_ids, None, None, reason, out.stop_reason)],
                reason is not None,
            )

    async def events(body: ChatRequest, request: EngineRequest) -> AsyncIterator[str]:
        created, num_tokens, first = int(time.time()), 0, True
        include_usage = body.stream_options is not None and body.stream_options.include_usage

        def data(**more: Any) -> str:
            chunk = StreamResponse(
                id=request.request_id,
                object="chat.completion.chunk",
                created=created,
                model="smollm2",
                **more,
            )
            return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

        async for result in generate(request):
            if first:
                delta = DeltaMessage(role="assistant", content="")
                yield data(choices=[StreamChoice(index=0, delta=delta, logprobs=None, finish_reason=None)])
                first = False
            for output in result.outputs:
                delta = DeltaMessage(content=output.text)
                num_tokens += len(output.token_ids)
                if output.finish_reason is None:
                    choice = StreamChoice(
                        index=0, delta=delta, logprobs=None, finish_reason=None, token_ids=None
                    )
                else:
                    choice = StreamChoice(
                        index=0,
                        delta=delta,
                        logprobs=None,
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                    )
                yield data(choices=[choice])
        if include_usage:
            yield data(
                choices=[],
                usage=Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens),
            )
        yield "data: [DONE]\n\n"

    app = FastAPI()
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_credentials=False, allow_methods=["*"], allow_headers=["*"]
    )

    async def validate_json(request: Request) -> None:
        if request.headers.get("content-type", "").lower().split(";")[0] != "application/json":
            raise ValueError("only application/json")

    @app.post("/v1/chat/completions", dependencies=[Depends(validate_json)])
    async def chat(body: ChatRequest, raw: Request) -> Any:
        prompt = tokenizer.apply_chat_template(body.messages)
        params = SamplingParams(max_tokens=body.max_tokens, ignore_eos=body.ignore_eos)
        request = EngineRequest(f"chatcmpl-{uuid.uuid4().hex}", prompt, params)
        return StreamingResponse(events(body, request), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "smollm2"}]}

    return app


# The client


class Stream(asyncio.Protocol):
    """One request; counts the lines of data that come, and no more."""

    def __init__(self, request: bytes) -> None:
        self.request, self.lines, self.first, self.tail = request, 0, 0.0, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        data = self.tail + data
        self.lines += data.count(b"data: ")
        self.tail = data[-5:]  # a mark cut in two is found with the next piece
        if not self.first and self.lines:
            self.first = time.perf_counter()

    def connection_lost(self, error) -> None:
        self.done.set_result(None)


async def spin() -> None:
    """Keeps the client's core awake: in a virtual machine, waking it for each chunk costs the server more
    than making the chunk."""
    while True:
        await asyncio.sleep(0)


async def load(port: int, streams: int, tokens: int) -> dict[str, float]:
    body = json.dumps(
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Tell me about the sea."}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
    loop, start = asyncio.get_running_loop(), time.perf_counter()
    protocols = [
        (await loop.create_connection(lambda: Stream(request), "127.0.0.1", port))[1] for _ in range(streams)
    ]
    spinning = asyncio.create_task(spin())
    await asyncio.gather(*(p.done for p in protocols))
    spinning.cancel()
    seconds = time.perf_counter() - start
    # a role, tokens, the end, [DONE]
    short = [p.lines for p in protocols if not tokens + 1 <= p.lines <= tokens + 3]
    if short:
        raise SystemExit(
            f"{len(short)} of {streams} streams had {short[:5]} lines, not {tokens} and a few: not a token "
            "a chunk"
        )
    return {
        "seconds": seconds,
        "tokens_per_s": streams * tokens / seconds,
        "median_first_s": statistics.median(p.first - p.sent for p in protocols),
        "last_first_s": max(p.first - p.sent for p in protocols),
    }


class Running:
    """A server in a process of its own, pinned to one core; the client has the others."""

    def __init__(self, name: str, more: tuple[str, ...] = ()) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, *more, __file__, "--serve", name, "--port", str(self.port)]
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server {name} did not start") from None
                time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def pin(self, cores: list[int]) -> None:
        for process in self.processes():
            for thread in process.threads():
                psutil.Process(thread.id).cpu_affinity(cores)

    def cpu_seconds(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

    def close(self) -> None:
        for process in reversed(self.processes()):
            process.terminate()
        self.process.wait(20)


def compare(names: list[str], streams: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    running = {name: Running(name) for name in names}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for server in running.values():
            asyncio.run(load(server.port, 16, 64))  # warm
            server.pin(cores[:1])
        for i in range(rounds):
            for name in names:
                before = running[name].cpu_seconds()
                found = asyncio.run(load(running[name].port, streams, tokens))
                found["tokens_per_cpu_s"] = streams * tokens / (running[name].cpu_seconds() - before)
                figures[name].append(found)
                print(
                    f"round {i + 1}  {name:8} {found['tokens_per_s']:9,.0f} tokens/s, "
                    f"{found['tokens_per_cpu_s']:9,.0f} a CPU second, "
                    f"first after {found['median_first_s']:.2f} s, the last stream's "
                    f"{found['last_first_s']:.2f} s",
                    flush=True,
                )
    finally:
        for server in running.values():
            server.close()
    return {
        name: {key: statistics.median(f[key] for f in found) for key in found[0]}
        for name, found in figures.items()
    }


def compare_json(repeat: int = 50_000) -> dict[str, float]:
    """Microseconds a chunk: the whole object dumped by each library, and only its text spliced into a prefix
    that is made once."""
    import msgspec
    import orjson

    def chunk(text: str) -> dict:
        return {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1760000000,
            "model": "smollm2",
            "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
        }

    before, after = orjson.dumps(chunk("\0")).split(b'"\\u0000"')
    encode = msgspec.json.Encoder().encode
    libraries = {"json": lambda value: json.dumps(value).encode(), "orjson": orjson.dumps, "msgspec": encode}
    ways = {name: lambda t, dump=dump: dump(chunk(t)) for name, dump in libraries.items()}
    ways |= {
        f"spliced, {name}": lambda t, dump=dump: before + dump(t) + after for name, dump in libraries.items()
    }
    texts = [" the", " sea", "\n", ' "quoted"', " été", "…"]
    found = {}
    for name, way in ways.items():
        assert all(json.loads(way(t)) == chunk(t) for t in texts)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for i in range(repeat):
                way(texts[i % 6])
            times.append((time.perf_counter() - start) / repeat * 1e6)
        found[name] = min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--profile", choices=SERVERS, help="run this one alone under cProfile and print what takes its time"
    )
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve = {
            "asyncio": serve_asyncio,
            "uvloop": serve_uvloop,
            "granian": serve_granian,
            "fastapi": serve_fastapi,
        }
        serve[arguments.serve](arguments.port)
        return
    if arguments.profile:
        server = Running(arguments.profile, ("-m", "cProfile", "-s", "tottime"))
        asyncio.run(load(server.port, arguments.streams, arguments.tokens))
        server.process.send_signal(2)
        server.process.wait(30)
        return
    found = compare(arguments.servers.split(","), arguments.streams, arguments.tokens, arguments.rounds)
    for name, figures in found.items():
        print(
            f"{name:8} {figures['tokens_per_s']:9,.0f} tokens/s, {figures['tokens_per_cpu_s']:9,.0f} a CPU "
            "second"
        )
        if "fastapi" in found and name != "fastapi":
            for key in ("tokens_per_s", "tokens_per_cpu_s"):
                figures[f"{key}_to_fastapi"] = figures[key] / found["fastapi"][key]
            by_clock, by_cpu = figures["tokens_per_s_to_fastapi"], figures["tokens_per_cpu_s_to_fastapi"]
            print(f"{'':8} {by_clock:.2f} times fastapi by the clock, {by_cpu:.2f} by CPU seconds")
    chunks = compare_json()
    print("us a chunk: " + ", ".join(f"{name} {us:.2f}" for name, us in chunks.items()))
    if arguments.json:
        versions = {"python": platform.python_version(), "cores": os.cpu_count()}
        with open(arguments.json, "w") as file:
            json.dump(
                {
                    "streams": arguments.streams,
                    "tokens": arguments.tokens,
                    "rounds": arguments.rounds,
                    "servers": found,
                    "us_a_chunk": chunks,
                    **versions,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
