"""An external worker for tests: a server that looks from outside as vLLM's does, and breaks on request.

A token is a byte. The next one follows from all tokens so far, so that an answer which began at one worker
and ended at another can be compared with `written`.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import random
import sys
import threading
from dataclasses import dataclass, field

from aiohttp import web

MODEL = "toy"
CHARACTERS = {
    "letters": [c.encode() for c in "abcdefghij klmnopqrst"],
    "unicode": [c.encode() for c in "鱼群一起游动é😀 ab"],
    "junk": [b"a", b" ", b"\xc7", b"\xe9", b"\xb1", b"\xff", b"\xf0"],  # little of it is UTF-8
}


def ids_of(text: str | list[int]) -> list[int]:
    return list(text.encode()) if isinstance(text, str) else list(text)


def template(messages: list[dict]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def next_tokens(tokens: list[int], alphabet: str):
    """Yields tokens for ever. A character that is not whole yet is continued."""
    data = bytes(tokens)
    pending = b""
    for size in (1, 2, 3) if alphabet != "junk" else ():
        tail = data[-size:]
        if tail and tail[0] >= 0xC0 and len(tail) < (2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4):
            data, pending = data[:-size], tail
            break
    while True:
        number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        characters = CHARACTERS[alphabet]
        character = characters[number % len(characters)]
        yield from character[len(pending) :]
        data, pending = data + character, b""


def written(prompt: str | list[int], count: int, alphabet: str = "letters", stop: str | None = None) -> str:
    """Returns a worker's answer to the prompt."""
    source = next_tokens(ids_of(prompt), alphabet)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(bytes(next(source) for _ in range(count)))
    return text if stop is None else text.partition(stop)[0]


@dataclass
class Received:
    path: str
    data: bytes
    headers: dict[str, str]
    peer: object  # the other end of the connection
    prompt: list[int] = field(default_factory=list)
    state: str = "running"  # then "done", "broken", or "left" by the client

    @property
    def body(self) -> dict:
        return json.loads(self.data)


@dataclass
class Fault:
    """`kind`: "break", "hang", "garble", "error" (an event), or a status. It strikes after `after` tokens, for
    `times` requests."""

    kind: str | int
    after: int = 0
    times: int = 1 << 30
    headers: dict[str, str] = field(default_factory=dict)


class ExternalWorker:
    def __init__(
        self,
        *,
        alphabet: str = "letters",
        chunk_sizes: tuple[int, ...] = (1,),
        seed: int = 0,
        gives_ids: bool = True,
        has_tokenizer: bool = True,
        unknown_fields: tuple[str, ...] = (),
        adapters: tuple[str, ...] = (),
        primes: bool = True,
        delay: float = 0.0,
        port: int = 0,
    ) -> None:
        """chunk_sizes: how many tokens a chunk has, at random. unknown_fields: requests with one of them are
        refused. primes: half a character at the end of the prompt is shown whole with its second half, as by
        vLLM."""
        self.alphabet, self.chunk_sizes, self.rng = alphabet, chunk_sizes, random.Random(seed)
        self.gives_ids, self.has_tokenizer, self.unknown_fields = gives_ids, has_tokenizer, unknown_fields
        self.adapters, self.primes, self.delay, self.port = adapters, primes, delay, port
        self.faults: list[Fault] = []
        self.received: list[Received] = []  # but questions of the router itself
        self.asked: list[str] = []  # paths of these
        self.url = ""
        self.tokenize_delay = 0.0
        self.says_done = True  # [DONE]
        self.end_delay = 0.0  # seconds from [DONE] to the end of the answer

    async def __aenter__(self) -> ExternalWorker:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._about)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    # What the router asks

    async def _about(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        """As vLLM's, of an engine with room for four requests."""
        self.asked.append(request.path)
        running = sum(received.state == "running" for received in self.received)
        told = {
            "num_requests_running": running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": running / 4,
        }
        lines = [
            f'vllm:{name}{{engine="0",model_name="{MODEL}"}} {value:.1f}\n' for name, value in told.items()
        ]
        return web.Response(text="".join(lines))

    async def _models(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        cards = [{"id": MODEL, "parent": None, "max_model_len": 1 << 20}]
        cards += [{"id": name, "parent": MODEL, "max_model_len": 1 << 20} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        await asyncio.sleep(self.tokenize_delay)
        if not self.has_tokenizer:
            return web.json_response({"error": {"message": "nothing here"}}, status=404)
        body = await request.json()
        return web.json_response(
            {"tokens": ids_of(body["prompt"] if "prompt" in body else template(body["messages"]))}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not self.has_tokenizer:
            return web.json_response({"error": {"message": "nothing here"}}, status=404)
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode(errors="replace")})

    # What clients ask

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received = Received(
            request.path_qs,
            await request.read(),
            dict(request.headers),
            request.transport.get_extra_info("peername"),
        )
        if b'"1 2 3"' not in received.data:  # the router's own probe
            self.received.append(received)
        try:
            return await self._answer(request, received)
        except (asyncio.CancelledError, ConnectionError):
            received.state = "left" if received.state == "running" else received.state
            raise
        finally:
            received.state = "done" if received.state == "running" else received.state

    async def _answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        body = received.body
        named = [name for name in self.unknown_fields if name in body]
        if named:
            return web.json_response({"error": {"message": f"unknown field {named[0]}"}}, status=400)
        fault = next((one for one in self.faults if one.times > 0), None)
        if fault is not None:
            fault.times -= 1
            if isinstance(fault.kind, int):
                error = {"error": {"message": "a fault on demand", "code": fault.kind}}
                return web.json_response(error, status=fault.kind, headers=fault.headers)
        if request.path not in ("/v1/completions", "/v1/chat/completions"):
            return web.json_response({"path": request.path, "given": body})
        chat = "chat" in request.path
        prompt = ids_of(template(body["messages"]) if chat else body["prompt"])
        received.prompt = prompt
        answer = _Answer(self, body, prompt, chat)
        if not body.get("stream"):
            for _ in answer.steps():
                if fault is not None and answer.num_tokens >= fault.after:
                    return await self._misbehave(request, None, received, fault)
                await asyncio.sleep(self.delay)
            return web.json_response(answer.whole())
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        if chat:
            await stream.write(answer.role())
        for chunk in answer.steps():
            if fault is not None and answer.num_tokens > fault.after:
                return await self._misbehave(request, stream, received, fault)
            await stream.write(chunk)
            await asyncio.sleep(self.delay)
        if fault is not None:
            return await self._misbehave(request, stream, received, fault)
        if (body.get("stream_options") or {}).get("include_usage"):
            await stream.write(answer.usage_chunk())
        if self.says_done:
            await stream.write(b"data: [DONE]\n\n")
        await asyncio.sleep(self.end_delay)
        return stream

    async def _misbehave(
        self, request: web.Request, stream: web.StreamResponse | None, received: Received, fault: Fault
    ) -> web.StreamResponse:
        if fault.kind == "hang":
            await asyncio.sleep(3600)
        received.state = "broken"
        if stream is not None and fault.kind == "garble":
            nonsense = (
                b'{"choices": [{',
                b'{"choices": [5]}',
                b'{"choices": [{"delta": 5, "text": 5}]}',
                b"[]",
            )
            await stream.write(b"data: %b\n\n" % self.rng.choice(nonsense))
        if stream is not None and fault.kind == "error":
            await stream.write(
                b'data: {"error": {"message": "the engine died", "code": 500}}\n\ndata: [DONE]\n\n'
            )
            return stream
        assert request.transport is not None
        request.transport.close()
        return stream or web.Response(status=500)


class _Answer:
    """As vLLM: with stop strings it holds back as much text as could begin the longest."""

    def __init__(self, worker: ExternalWorker, body: dict, prompt: list[int], chat: bool) -> None:
        self.worker, self.body, self.prompt, self.chat = worker, body, prompt, chat
        stop = body.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else stop
        self.limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.num_tokens = 0
        self.text = ""
        self.finish_reason: str | None = None
        self.head = {
            "id": f"toy-{random.getrandbits(40)}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": random.randrange(1 << 30),
            "model": body.get("model", MODEL),
        }
        self.ids = bool(body.get("return_token_ids")) and worker.gives_ids

    def role(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._event([choice], **({"prompt_token_ids": self.prompt} if self.ids else {}))

    def steps(self):
        """Yields chunks."""
        source = next_tokens(self.prompt, self.worker.alphabet)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self.worker.primes:
            decoder.decode(bytes(self.prompt))
        held = max((len(stop) - 1 for stop in self.stops), default=0)
        sent = 0
        while self.finish_reason is None:
            size = min(self.worker.rng.choice(self.worker.chunk_sizes), self.limit - self.num_tokens)
            tokens = [next(source) for _ in range(size)]
            first = self.num_tokens == 0
            self.num_tokens += size
            self.text += decoder.decode(bytes(tokens), final=False)
            for stop in self.stops:
                if stop in self.text:
                    self.text, self.finish_reason = self.text.partition(stop)[0], "stop"
            if self.finish_reason is None and self.num_tokens >= self.limit:
                self.finish_reason = "length"
            end = len(self.text) if self.finish_reason else max(sent, len(self.text) - held)
            text, sent = self.text[sent:end], end
            choice = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
            choice |= {"delta": {"content": text}} if self.chat else {"text": text}
            if self.ids:
                choice["token_ids"] = tokens
                if first and not self.chat:
                    choice["prompt_token_ids"] = self.prompt
            yield self._event([choice])

    def usage(self) -> dict:
        given, done = len(self.prompt), self.num_tokens
        details = {"cached_tokens": given // 2}
        return {
            "prompt_tokens": given,
            "completion_tokens": done,
            "total_tokens": given + done,
            "prompt_tokens_details": details,
        }

    def usage_chunk(self) -> bytes:
        return self._event([], usage=self.usage())

    def whole(self) -> dict:
        choice = {"index": 0, "finish_reason": self.finish_reason}
        choice |= (
            {"message": {"role": "assistant", "content": self.text}} if self.chat else {"text": self.text}
        )
        return {**self.head, "choices": [choice], "usage": self.usage()}

    def _event(self, choices: list[dict], **more) -> bytes:
        return b"data: %b\n\n" % json.dumps({**self.head, "choices": choices, **more}).encode()


class ExternalWorkerThread:
    """The same in a loop of its own, beside a test that has none. `worker.call(coroutine function)` runs there."""

    def __init__(self, **options) -> None:
        self.worker = ExternalWorker(**options)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with self.worker:
            self._ready.set()
            await self._end.wait()

    def __enter__(self) -> ExternalWorker:
        self._thread.start()
        assert self._ready.wait(30), "the stand-in did not start"
        return self.worker

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)


async def main(port: int) -> None:
    async with ExternalWorker(port=port, delay=0.02):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
