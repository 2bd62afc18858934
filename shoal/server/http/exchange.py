"""One HTTP request and its answer on ASGI: reads the body within limits, answers, streams, and notices a
client that leaves."""

from __future__ import annotations

import asyncio
import codecs
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shoal.api import FinishReason, Span
from shoal.fleet_api import tags_of
from shoal.sampling_params import SamplingParams
from shoal.server.errors import ApiError
from shoal.server.http.arrival_log import log_arrival
from shoal.server.http.context import ServerContext
from shoal.server.http.decode import check_size, decode, unknown_fields
from shoal.server.http.error_shapes import ErrorResponse
from shoal.server.http.request_fields import refuse, why_ignored
from shoal.server.served.generation import Generation
from shoal.server.served.model import Prompt, ServedModel
from shoal.telemetry.timeline import Timeline
from shoal.telemetry.tracing import TRACE_HEADERS, Trace

T = TypeVar("T")
Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"
DONE = b"data: [DONE]\n\n"
ALWAYS_SEARCHED = 1 << 12  # bytes: bodies up to this size are always searched for unknown fields
MAX_SESSION = 256  # characters
MAX_ID = 256  # characters
MAX_UNKNOWN = 20  # unknown fields of one request that are logged
LINGER_SECONDS = 2.0  # for a client that is still sending to read its refusal
# The key, in a request's scope, of the function that the connection calls when the client leaves. ASGI's own
# way, a task per handler that waits for the message http.disconnect, costs more than reading the request.
ON_LEAVE = "shoal.on_leave"


def without_line_separators(events: bytes) -> bytes:
    """Returns the JSON of a stream with U+0085, U+2028 and U+2029 escaped. Many clients, such as those on
    httpx, split lines there too."""
    if not events.isascii():
        for char in "\x85\u2028\u2029":
            events = events.replace(char.encode(), b"\\u%04x" % ord(char))
    return events


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of errors and streams in one of the APIs that this server has."""

    name: str  # the company whose API it is
    error: type  # the Struct of an error, for the OpenAPI document
    error_body: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]  # the event of a stream that fails midway
    stream_type: str = "text/event-stream; charset=utf-8"
    id_headers: tuple[str, ...] = ("x-request-id",)  # each holds the request's id


def openai_error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n" + DONE


OPENAI = Dialect("OpenAI", ErrorResponse, ApiError.body, openai_error_event)


class ClientGone(Exception):
    """The client left before its request was whole."""


class Exchange:
    """Handlers get an exchange, read `body` through `decode`, and answer with `json`, with `respond`, or
    with any number of `send` and one `end`."""

    def __init__(
        self,
        context: ServerContext,
        scope: Scope,
        receive: Receive,
        send: Send,
        before_end: Callable[[Exchange], None],
    ) -> None:
        """before_end: called once, before the answer's last bytes go out."""
        self.context, self.models, self.scope = context, context.models, scope
        self._receive, self._send, self._before_end = receive, send, before_end
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        # By lower-case name. Of headers that are repeated this is the last.
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.body = b""
        self.size = 0  # bytes of the body so far
        self.more_headers: list[tuple[bytes, bytes]] = []  # go out with the answer, whatever it is
        self.arrival = time.perf_counter()
        # Set from the route.
        self.handler = "none"  # the route's path
        self.is_quiet = False
        self.dialect = OPENAI
        # The client's name of a field, by the name in error messages. Set by the handler.
        self.names: dict[str, str] = {}
        self.generation: Generation | None = None  # see generate
        self._last = b""  # events of a stream that are sent together with its end
        self.line: Timeline | None = None  # see begin_line
        self._trace: Trace | None = None
        self._read_at = self.arrival  # when the body was in
        self.status: int | None = None  # None: no byte of the answer is out
        self.error: ApiError | None = None  # sent to the client, possibly in the middle of a stream
        self.ended = False
        self.read_all = False  # nothing of the body is left in the socket
        self.is_gone = False
        self.end_error: ApiError | None = None  # why the server ended it
        self.error_event: Callable[[ApiError], bytes] | None = None  # instead of the dialect's
        self._task = asyncio.current_task()
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self._is_named = _is_id(given)
        self.request_id = given if self._is_named else secrets.token_hex(16)

    # Input

    async def read(self) -> None:
        """Reads the body. Raises ApiError: 413 if it is too large, 408 if it is too slow, 429 if the
        bodies of all requests are too large together. Raises ClientGone."""
        config = self.context.config
        limit, seconds = config.max_body_bytes, config.read_timeout
        try:
            length = int(self.headers.get(b"content-length", b"0"))
        except ValueError:
            raise ApiError(400, "the header Content-Length must be a number") from None
        encoding = self.headers.get(b"content-encoding", b"identity").decode("latin-1").strip()
        if encoding.lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"the header Content-Encoding must be absent or identity, got {encoding!r:.100}; send the "
                "body uncompressed",
                headers={"accept-encoding": "identity"},  # RFC 9110, 12.5.3: what the client may send
            )
        if length > limit:
            raise too_large(limit)
        parts = []
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    self.size += len(part)
                    self.context.body_bytes += len(part)
                    if self.size > limit:
                        raise too_large(limit)
                    if self.context.body_bytes > config.max_total_body_bytes:
                        raise ApiError(
                            429,
                            f"the requests under way have more than {config.max_total_body_bytes} bytes "
                            "together, the most this server takes (--max-total-body-bytes); try again later",
                        )
                    parts.append(part)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(
                408, f"the request's body did not arrive within {seconds:g} s; send it at once"
            ) from None
        self.scope[ON_LEAVE] = self._leave
        self.read_all, self._read_at = True, time.perf_counter()
        # PowerShell 5.1 begins a body with a byte order mark.
        self.body = b"".join(parts).removeprefix(codecs.BOM_UTF8)

    def decode(self, kind: type[T]) -> T:
        """Returns the body as this Struct, and logs unknown fields. Raises ApiError (400), which names the
        wrong field."""
        check_size(self.body, self.models.most_tokens)
        request = decode(kind, self.body)
        refuse(kind, self.body)
        # The search costs a third of what decoding costs. Large bodies of the same client are much alike, so
        # the first is searched.
        is_small = len(self.body) <= ALWAYS_SEARCHED
        if is_small or self.context.client_warnings.is_new(self.client, f"large {kind.__name__}"):
            for name in unknown_fields(kind, self.body)[:MAX_UNKNOWN]:
                why = why_ignored(kind, name)
                message = f"{self.path} takes no field {name!r:.100}: it is ignored{why}"
                self.warn(f"{self.path} {name:.100}", message)
        return request

    def warn(self, what: str, message: str) -> None:
        """Logs `message`, once for this client and `what`."""
        self.context.client_warnings.warn(self.client, what, message)

    @property
    def client(self) -> str:
        """The name of the client's program, or else its address."""
        address = (self.scope.get("client") or ("unknown",))[0]
        return self.headers.get(b"user-agent", b"").decode("latin-1")[:200] or str(address)

    def named(self, given: str | None) -> str:
        """Returns the id of the answer, which a request's body may set. All logs use that id too, unless
        the header X-Request-Id names another, or a header could not hold it."""
        if given is not None and not self._is_named and _is_id(given):
            self.request_id, self._is_named = given, True
        return given or self.request_id

    def begin_line(self, model: str, *, is_listed: bool = True) -> Timeline:
        """Starts the timeline of a request to this model, once its prompt is tokenized."""
        line = self.line = Timeline(self.request_id, model, self.handler, self.arrival)
        now = time.perf_counter()
        line.add([Span("tokenize", now - self._read_at, now - self._read_at)], now)
        given = {name: self._joined(name.encode()) for name in TRACE_HEADERS}
        headers = {name: value for name, value in given.items() if value}
        if self.context.tracing is not None:
            self._trace = self.context.tracing.begin(line, headers)
            headers = self._trace.headers
        line.trace_headers = headers or None
        if is_listed:
            self.context.timelines.add(line)
        return line

    def generate(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        id_prefix: str = "",
        request_id: str | None = None,
        user: Any = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        embed: bool = False,
        cuts_max_tokens: bool = False,
    ) -> Generation:
        """Returns the generation that answers this request; entering it starts it. id_prefix: put before the
        request's id. request_id: the body's own. user: see `session`. The others: see Generation."""
        name = self.named(request_id)
        self.generation = Generation(
            model,
            prompts,
            params,
            self.begin_line(model.name),
            request_id=id_prefix + name,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
            session=self.session(user),
            tags=self.tags,
            embed=embed,
            cuts_max_tokens=cuts_max_tokens,
        )
        if self.context.config.enable_log_requests:
            log_arrival(self.request_id, self.handler, self.generation, self.context.config)
        return self.generation

    def _joined(self, name: bytes) -> str:
        """Returns a header that may be split into several, joined as HTTP says."""
        values = [value for found, value in self.scope["headers"] if found == name]
        return b",".join(values).decode("latin-1")

    def end_line(self) -> None:
        """Ends the timeline."""
        if self.line is None:
            return
        if self.is_gone:
            self.line.reasons.add(FinishReason.ABORT)
        # An external worker's refusal is passed on unchanged, and does not set `error`.
        status = self.error.status if self.error is not None else self.status or 0
        self.line.end(has_failed=status >= 400)
        if self._trace is not None:
            self._trace.end(self.line, str(status) if status >= 400 else None)
        self.line.params = None  # a grammar may be long

    def session(self, user: Any = None) -> str | None:
        """Returns the key that keeps requests at one worker of a fleet: the header X-Session-ID, else the
        body's `user`, if it is a text."""
        given = self.headers.get(b"x-session-id", b"").decode("latin-1")
        return (given or (user if isinstance(user, str) else ""))[:MAX_SESSION] or None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the worker of a fleet must have."""
        return tags_of(self.headers)

    def query(self) -> dict[str, list[str]]:
        """Returns the parameters of the URL: all values of each name. Raises ApiError (400) for invalid
        UTF-8."""
        try:
            return urllib.parse.parse_qs(
                self.scope["query_string"].decode("ascii"), keep_blank_values=True, errors="strict"
            )
        except ValueError:
            raise ApiError(400, "the URL's query must be percent-encoded UTF-8") from None

    def _leave(self) -> None:
        """Cancels the handler, as the client has left."""
        if self._may_be_cancelled and self._task is not None:
            self.is_gone = True
            self._task.cancel()

    def stop(self, error: ApiError) -> None:
        """Ends the exchange from outside: cancels its handler, and sends `error` to its client."""
        if self._may_be_cancelled and self._task is not None:
            self.end_error = error
            self._task.cancel()

    @property
    def _may_be_cancelled(self) -> bool:
        """True while the handler works. Once it has answered or failed, it only waits for the client to
        read."""
        return not self.ended and self.error is None

    # Output

    async def json(self, value: Any, status: int = 200) -> None:
        await self.respond(value if isinstance(value, bytes) else msgspec.json.encode(value), status)

    async def respond(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        await self._start(status, content_type, [(b"content-length", b"%d" % len(body))], headers)
        self._end()
        await self._send({"type": "http.response.body", "body": body})

    async def send(self, events: bytes) -> None:
        """Sends the next part of a stream; the first part begins it. Waits while the client is slow to
        read. Events that arrive after all answers have ended are sent with the stream's end."""
        if self.generation is not None and self.generation.has_ended:
            self._last += events
            return
        await self._begin_stream()
        body = without_line_separators(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, events: bytes = DONE) -> None:
        """Sends the last part of a stream. Begins it, if nothing was sent yet."""
        await self._begin_stream()
        self._end()
        body = without_line_separators(self._last + events)
        await self._send({"type": "http.response.body", "body": body})

    async def _begin_stream(self) -> None:
        if self.status is None:
            await self._start(
                200,
                self.dialect.stream_type.encode("ascii"),
                [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")],
            )

    async def fail(self, error: ApiError) -> None:
        """Sends an error: as an answer, or as a stream's last event."""
        if self.ended:
            return
        self.error = error
        if self.status is not None:
            await self.end((self.error_event or self.dialect.error_event)(error))
            return
        body = self.dialect.error_body(error)
        if self.read_all:
            await self.respond(body, error.status, headers=error.headers)
            return
        await self._start(
            error.status,
            JSON,
            [(b"content-length", b"%d" % len(body)), (b"connection", b"close")],
            error.headers,
        )
        self._end()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self._linger()
        await self._send({"type": "http.response.body", "body": b""})

    def _end(self) -> None:
        """Called before the last bytes are sent, so that the log has the request before its client has the
        answer."""
        self.ended = True
        self._before_end(self)

    async def _start(
        self,
        status: int,
        content_type: bytes,
        headers: list[tuple[bytes, bytes]],
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        headers = [
            (b"content-type", content_type),
            *headers,
            *((name.encode("ascii"), self.request_id.encode("ascii")) for name in self.dialect.id_headers),
            *self.more_headers,
        ]
        if self.generation is not None and (worker := self.generation.worker):
            headers.append((b"x-shoal-worker", worker.encode("ascii")))
            if prefill_worker := self.generation.prefill_worker:
                headers.append((b"x-shoal-prefill-worker", prefill_worker.encode("ascii")))
        headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in (more or {}).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _linger(self) -> None:
        """Reads and drops some of the data that the client still sends. A socket that is closed with
        unread data is reset, and then the client never sees the answer."""
        left = self.context.config.max_body_bytes
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
        except TimeoutError:
            pass


def _is_id(text: str) -> bool:
    return 0 < len(text) <= MAX_ID and text.isascii() and text.isprintable()


def too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {limit} bytes, the most this server takes (--max-body-bytes); send less"
    )
