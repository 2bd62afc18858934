"""The real server on loopback, in a thread, in front of a FakeEngine and a tokenizer of bytes: FakeServer,
and tool_server for models with tools and thoughts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from shoal.api import Request
from shoal.config import ServerConfig
from shoal.fake_engine import FakeEngine
from shoal.server.app import create_admin_app, create_app
from shoal.server.run import open_ports, serve_until, url_of
from shoal.server.served.catalog import Catalog
from shoal.server.served.model import LoadedModel, ServedModel
from shoal.text.tokenizer import Tokenizer

NAME = "tiny"
END = 257
# A template as Qwen3's: it knows tools and thoughts.
TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}(thought: {{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@functools.cache
def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """With a chat template of its own, or `template`."""
    from tests.tiny import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(folder)
    if template is not None:
        tokenizer.chat_templates = {"default": template}
    return tokenizer


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def engine_saying(text: str, **options) -> FakeEngine:
    """An engine for FakeServer's vocabulary whose answers repeat `text`."""
    return FakeEngine(300, reply=ids_of(text), **options)


class FakeServer:
    """`engine` may be adjusted between requests. Ends when the block does."""

    def __init__(self, engine: FakeEngine | None = None, *, model: dict | None = None, **options) -> None:
        self.engine = engine or engine_saying("hello world, how are you? ")
        self.settings = model or {}
        self.config = ServerConfig(**{"port": 0, "admin_port": 0, "shutdown_timeout": 20.0, **options})
        self.port = self.admin_port = 0
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - shown by the test that started it
            self.error = error
        self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.drain, self.force = asyncio.Event(), asyncio.Event()
        loaded = {
            "tokenizer": byte_tokenizer(),
            "max_model_len": 256,
            "vocab_size": 300,
            "eos_token_ids": (END,),
            "max_num_seqs": 256,
        }
        of_loaded = {one.name for one in dataclasses.fields(LoadedModel)}
        loaded |= {name: value for name, value in self.settings.items() if name in of_loaded}
        self.model = ServedModel(
            **{
                "names": [NAME],
                "engine": self.engine,
                "loaded": LoadedModel(**loaded),
                "max_queued_requests": self.config.max_queued_requests,
                "request_timeout": self.config.request_timeout,
                "trust_request_chat_template": self.config.trust_request_chat_template,
                **{name: value for name, value in self.settings.items() if name not in of_loaded},
            }
        )
        models = Catalog([self.model])
        self.app = create_app(models, self.config)

        def ready(port: int, admin_port: int | None) -> None:
            self.port, self.admin_port = port, admin_port or 0
            self._ready.set()

        await serve_until(
            self.drain,
            self.force,
            self.app,
            create_admin_app(models, self.config),
            self.config,
            open_ports(self.config),
            ready=ready,
        )

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(60)
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.call(self.force.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"

    def wait_end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"

    def call(self, function) -> None:
        self.loop.call_soon_threadsafe(function)

    def say(self, text: str, token_seconds: float = 0.0) -> None:
        """Makes `text` the answer to all requests from now on, a token (a byte) every `interval_s` seconds."""
        self.engine.reply, self.engine.token_seconds = ids_of(text), token_seconds

    def last_request(self) -> Request:
        """Returns the last request that the engine got."""
        return self.engine.seen[-1]

    def last_prompt(self) -> str:
        return byte_tokenizer().decode(self.last_request().prompt_token_ids, skip_special_tokens=False)

    @property
    def url(self) -> str:
        return url_of(self.config, self.port)

    def request(self, path, body=None, *, method=None, headers=None, admin=False, timeout=60):
        """(status, headers, body text). `body` is JSON-encoded unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        port = self.admin_port if admin else self.port
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            data=data,
            headers=headers or {},
            method=method or ("GET" if data is None else "POST"),
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def json(self, path, body=None, **options):
        status, _, text = self.request(path, body, **options)
        return status, json.loads(text)

    def events(self, path, body):
        """The `data:` lines of a stream, decoded; [DONE] is checked and left out."""
        status, _, text = self.request(path, body)
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def raw(self, data: bytes) -> socket.socket:
        """A connection that has sent `data`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(data)
        return connection

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = [
            x for x in self.request("/metrics")[2].splitlines() if x.startswith((name + "{", name + " "))
        ]
        assert lines, f"no metric {name}"
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines)


def tool_server(*, model: dict | None = None, **options) -> FakeServer:
    """The server of a model that may call tools and think, in Qwen3's format; each answer ends where what was
    `say`d does."""
    settings = {
        "tokenizer": byte_tokenizer(TEMPLATE),
        "max_model_len": 4096,
        "vocab_size": 258,
        "max_num_seqs": 16,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    return FakeServer(FakeEngine(258, ends=True), model={**settings, **(model or {})}, **options)


def post(path: str, body: object, *, more_headers: str = "") -> bytes:
    """An HTTP request as bytes."""
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{more_headers}\r\n".encode()
        + data
    )


def read_until(connection: socket.socket, marker: bytes = b"") -> bytes:
    """Returns what arrives up to `marker`; without one, up to the end."""
    found = b""
    while not marker or marker not in found:
        part = connection.recv(1 << 16)
        if not part:
            return found
        found += part
    return found
