"""`ExternalForwarder`: sends a client's request to one external worker, and to another if that one fails. The
dispatcher assigns the worker; link.py is its HTTP, request.py builds bodies, stream.py joins the answers.

A failure before the first token is retried, unseen by the client. After it, a stream of completions or chats
continues on another worker (stream.py), and any other answer ends with an error.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from shoal.api import Span
from shoal.errors import BusyError, RequestError, UnavailableError, WorkerFailedError
from shoal.fleet.external.link import ExternalExchange, ExternalLink
from shoal.fleet.external.prompt_tokens import PROMPT_FIELDS, PromptTokens, text_numbers
from shoal.fleet.external.request import CHAT, COMPLETIONS, ExternalRequest
from shoal.fleet.external.sse import SseReader
from shoal.fleet.external.stream import ExternalStream, TokenCounts, reasons_of
from shoal.fleet.routing.dispatcher import Assignment, Dispatcher, RoutingRequest
from shoal.fleet.worker import MovedError
from shoal.fleet_api import ExternalAnswer, ExternalCall, tags_of
from shoal.telemetry.logs import about
from shoal.telemetry.timeline import Timeline

STREAMS = ("text/event-stream", "application/x-ndjson")
REFUSED_FIELD = (400, 422)  # statuses of a strict server for an unknown field
MIN_TRIES = 2  # for a request without a token, even with a single worker
MAX_ERROR_BYTES = 1000
LARGE_BODY = 1 << 20  # bytes; one of this size is read in a thread
HALF = "\ufffd"  # shown for an incomplete character
MOST_HALF_TOKENS = 4  # tokens of an incomplete character

logger = logging.getLogger(__name__)


class _Whole(msgspec.Struct):
    """The part of an unstreamed answer that the router counts."""

    usage: dict[str, Any] | None = None
    choices: Any = None  # a list in an answer of OpenAI's shape


class _Head:
    """Status and headers of an answer."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_type = b"application/json"

    def fill(self, exchange: ExternalExchange, worker_id: str) -> None:
        self.status = exchange.status
        self.content_type = _bytes(exchange.headers.get("content-type", "application/json"))
        self.headers = [(b"x-shoal-worker", worker_id.encode("ascii"))]
        if "retry-after" in exchange.headers:
            self.headers.append((b"retry-after", _bytes(exchange.headers["retry-after"])))


class _RequestRecorder:
    """Records a request in its timeline and in the log. The work of an external worker until its first token
    is one span. Errors of such workers may quote a prompt, so they are not recorded."""

    def __init__(self, line: Timeline) -> None:
        self._line, self._answer = line, line.answer()
        self._worker = ""
        self._sent_at = 0.0
        self._left: tuple[float, Span] | None = None

    def arrived(self, assignment: Assignment[ExternalLink]) -> None:
        """Records that the request is assigned to a worker."""
        self._sent_at, self._worker = time.perf_counter(), assignment.worker.id
        self._line.add(assignment.take_spans(), self._sent_at)
        logger.debug(about(self._line.id, f"goes to worker {self._worker}", worker=self._worker))

    def tokens(self, count: int) -> None:
        now = time.perf_counter()
        spans = []
        if self._left is not None:
            then, span = self._left
            span.ago_s = span.seconds = now - then
            span.worker, self._left = self._worker, None
            spans.append(span)
        if self._sent_at:
            spans.append(Span("prefill", now - self._sent_at, now - self._sent_at, self._worker))
            self._sent_at = 0.0
        if spans:
            self._line.add(spans, now)
        if count:
            self._answer.tokens(count, now, self._worker)

    def left(self, assignment: Assignment[ExternalLink], why: str) -> None:
        """Records that the request leaves this worker for another one."""
        worker_id, num_tokens = assignment.worker.id, self._line.output_tokens
        move: dict[str, str | int | float] = {"from": worker_id, "why": why, "output_tokens": num_tokens}
        self._left = time.perf_counter(), Span("migration", 0.0, 0.0, attributes=move)
        text = f"leaves worker {worker_id} after {num_tokens} tokens: {why}"
        logger.info(about(self._line.id, text, worker=worker_id))

    def counted(self, num_prompt: int, num_cached: int) -> None:
        """Records the worker's report of prompt tokens."""
        if num_prompt:
            self._line.prompt_tokens, self._line.cached_tokens = num_prompt, num_cached

    def finished(self, reasons: Iterable[str]) -> None:
        """Records the worker's finish reasons."""
        self._line.reasons.update(reasons)


class ExternalForwarder:
    """The external workers of one model."""

    def __init__(
        self, dispatcher: Dispatcher[ExternalLink], tokens: PromptTokens, *, migration_limit: int
    ) -> None:
        """`migration_limit`: how many workers may fail one request after its first token."""
        self.num_migrations = 0  # streams that continued on another worker
        self.num_retries = 0  # retries of requests without a token
        self.token_counts = TokenCounts()  # summed over all answers that report them
        self._dispatcher, self._tokens = dispatcher, tokens
        self._migration_limit = migration_limit
        self._numbers = itertools.count()

    async def forward(self, call: ExternalCall) -> ExternalAnswer:
        """Implements Forwarder. `chunks` raises WorkerFailedError and UnavailableError for a stream that
        breaks and cannot continue elsewhere."""
        head = _Head()
        if len(call.body) < LARGE_BODY:
            request = ExternalRequest(call)
        else:
            request = await asyncio.to_thread(ExternalRequest, call)
        chunks = self._chunks(request, head)
        await anext(chunks)
        return ExternalAnswer(head.status, head.headers, chunks, head.content_type)

    async def _chunks(self, request: ExternalRequest, head: _Head) -> AsyncGenerator[bytes]:
        """Yields an empty piece when `head` is filled, and then the answer's bytes."""
        routing = await self._routing_request(request)
        stream = ExternalStream(request)
        recorder = _RequestRecorder(request.call.line)
        num_failures = num_migrations = 0
        try:
            while True:
                assignment: Assignment[ExternalLink] | None = None
                try:
                    async with (
                        self._dispatcher.assign(routing) as assignment,
                        aclosing(self._ask(assignment, stream, head, recorder)) as pieces,
                    ):
                        async for piece in pieces:
                            yield piece
                    return
                except MovedError:
                    assert assignment is not None, "only a worker's request moves"
                    recorder.left(assignment, "it waits there, and another worker would run it at once")
                except BusyError:
                    if assignment is None:  # the router's own queue is full
                        raise
                    recorder.left(assignment, "it is full")
                except WorkerFailedError as error:
                    if assignment is not None:
                        recorder.left(assignment, "it is not reachable" if error.is_absent else "it failed")
                    stream.break_off()
                    if stream.has_begun and not stream.has_finished and stream.blocked_reason() is None:
                        await self._settle(stream)
                    if stream.is_whole:
                        yield stream.finish()
                        return
                    if stream.has_begun:
                        num_migrations += 1
                        self._check_migration(stream, num_migrations, error)
                        routing.token_ids = stream.continuation()
                    else:
                        num_failures += 1
                        if num_failures >= MIN_TRIES and not self._has_fresh_worker(routing):
                            raise
                        self.num_retries += 1
        finally:
            self._dispatcher.end(routing)
            counts = stream.counts
            recorder.counted(counts.prompt, counts.cached)
            recorder.finished(stream.finish_reasons)
            if request.has_chunks:
                self.token_counts.add(stream.counts)

    async def _ask(
        self,
        assignment: Assignment[ExternalLink],
        stream: ExternalStream,
        head: _Head,
        recorder: _RequestRecorder,
    ) -> AsyncGenerator[bytes]:
        """Sends the request to a worker and yields the client's part of its answer. Raises BusyError if the
        worker is full, MovedError if another one would run the request at once, and WorkerFailedError."""
        link, request = assignment.worker.link, stream.request
        recorder.arrived(assignment)
        headers = request.headers()
        if len(assignment.worker.ranks) > 1:  # vLLM's header
            headers["X-data-parallel-rank"] = str(assignment.choice.rank.rank)
        while True:
            is_as_it_came, path, body = self._to_send(stream, link)
            exchange = link.exchange(request.call.method, path, body, headers)
            assignment.on_broken = exchange.abort
            if request.has_chunks and not stream.has_begun:  # an unstreamed answer may have begun unseen
                assignment.on_moving = functools.partial(_move, exchange, stream)
            async with exchange:
                error = await self._refusal(exchange, link)
                if error is not None and not is_as_it_came and _is_about_our_fields(exchange, error):
                    link.takes_token_ids = False
                    continue
                if error is not None and stream.has_begun:
                    raise UnavailableError(
                        f"the stream broke, and another worker refuses to continue it: {_shown(error)}"
                    )
                if error is not None:
                    pieces = _once(error)
                elif request.has_chunks and _content_type(exchange) in STREAMS:
                    pieces = self._read_chunks(exchange, assignment, stream, recorder)
                elif _content_type(exchange) in STREAMS:
                    pieces = self._read_stream(exchange, assignment, recorder)
                else:
                    pieces = self._read_whole(exchange, assignment, recorder)
                async with aclosing(pieces):
                    async for piece in pieces:
                        if not head.headers:
                            head.fill(exchange, assignment.worker.id)
                            yield b""
                        stream.has_begun = True
                        yield piece
                if not head.headers:  # an answer without a byte
                    head.fill(exchange, assignment.worker.id)
                    yield b""
                return

    def _to_send(self, stream: ExternalStream, link: ExternalLink) -> tuple[bool, str, bytes]:
        """Returns whether the body is unchanged, the path and the body."""
        request = stream.request
        if stream.has_begun:
            room = link.max_model_len(request.model)
            return False, COMPLETIONS, request.next_body(stream.prompt_ids or [], stream.token_ids, room)
        if request.blocked_reason is not None or not link.takes_token_ids:
            return True, request.call.path, request.call.body
        return False, request.call.path, request.first_body()

    async def _refusal(self, exchange: ExternalExchange, link: ExternalLink) -> bytes | None:
        """Returns the body of an answer that refuses the request, None for any other answer. Raises BusyError
        and WorkerFailedError for refusals that are not about the request."""
        status = exchange.status
        if status < 300:
            return None
        if status == 429:
            raise link.busy(exchange.headers.get("retry-after"))
        body = await exchange.whole()
        if status == 401:  # about the router's key, as the client's key is for the router alone
            raise link.failure("it refuses the router's key, or needs one; give it by api_key_file=")
        if status < 400 or status >= 500:
            raise link.failure(f"it answers {status}: {_shown(body)}")
        return body

    async def _read_chunks(
        self,
        exchange: ExternalExchange,
        assignment: Assignment[ExternalLink],
        stream: ExternalStream,
        recorder: _RequestRecorder,
    ) -> AsyncGenerator[bytes]:
        reader = SseReader()
        failure: WorkerFailedError | None = None
        async with aclosing(exchange.pieces()) as pieces:
            async for piece in pieces:
                events: list[bytes] = []
                num_tokens = 0
                try:
                    for data in reader.feed(piece):
                        event, count = stream.push(data)
                        events.append(event)
                        num_tokens += count
                        if stream.is_done:
                            break
                except WorkerFailedError as error:
                    failure = error
                if num_tokens:
                    assignment.streamed(num_tokens)
                    recorder.tokens(num_tokens)
                if stream.is_done and stream.cached_tokens is not None:
                    _count_cached(assignment, *stream.cached_tokens)
                if shown := b"".join(events):  # text before a failure counts as sent
                    yield shown
                if failure is not None:
                    raise failure
                if stream.is_done:
                    break
        if stream.is_done:
            if not stream.is_stopped:
                await exchange.read_end()
            return
        if not stream.has_finished:
            raise WorkerFailedError(f"the worker {assignment.worker.id} ended its stream before the end")
        yield stream.finish()  # some servers send no [DONE]

    async def _read_stream(
        self, exchange: ExternalExchange, assignment: Assignment[ExternalLink], recorder: _RequestRecorder
    ) -> AsyncGenerator[bytes]:
        """Passes on any other stream unchanged."""
        async with aclosing(exchange.pieces()) as pieces:
            async for piece in pieces:
                assignment.generated(1)
                recorder.tokens(1)
                yield piece

    async def _read_whole(
        self, exchange: ExternalExchange, assignment: Assignment[ExternalLink], recorder: _RequestRecorder
    ) -> AsyncGenerator[bytes]:
        body = await exchange.whole()
        assignment.generated(1)
        try:
            whole = msgspec.json.decode(body, type=_Whole)
        except ValueError:
            whole = _Whole()
        usage, num_tokens = whole.usage, 0
        if usage is not None:
            counts = TokenCounts.of(usage)
            num_tokens = counts.generated
            self.token_counts.add(counts)
            if assignment.worker.served is not None:
                assignment.worker.served.output_tokens += counts.generated
            recorder.counted(counts.prompt, counts.cached)
            if counts.prompt and usage.get("prompt_tokens_details"):
                _count_cached(assignment, counts.cached, counts.prompt)
        recorder.finished(reasons_of(whole.choices))
        recorder.tokens(num_tokens)
        yield body

    async def _settle(self, stream: ExternalStream) -> None:
        """Finds the tokens of the text that was sent. Workers withhold text that may begin a stop string, and
        a chunk of several tokens may end within a character. Raises UnavailableError if the text is unknown
        and some of it may have been withheld."""
        request, ids, sent = stream.request, stream.token_ids, stream.text
        model, prompt_ids = request.model, stream.prompt_ids or []
        text = whole = await self._tokens.text_of(model, prompt_ids, ids)
        count = len(ids)
        least = count if request.wants_token_ids else max(0, count - MOST_HALF_TOKENS)
        while text is not None and text.endswith(HALF) and count > least:
            count -= 1
            text = await self._tokens.text_of(model, prompt_ids, ids[:count])
        if text is not None and text.startswith(sent) and not text.endswith(HALF):
            stream.keep(count, text[len(sent) :])
        elif whole is not None and whole.startswith(sent):  # invalid UTF-8, as vLLM shows it
            stream.keep(len(ids), whole[len(sent) :].rstrip(HALF))
        elif any(len(stop) > 1 for stop in request.stops):
            raise UnavailableError(
                "the stream broke and cannot continue: the text of the generated tokens is unknown (no "
                "/detokenize, no --tokenizer), and part of it may have been withheld for a stop string"
            )

    def _check_migration(self, stream: ExternalStream, num_migrations: int, error: WorkerFailedError) -> None:
        """Raises UnavailableError if the stream cannot continue on another worker."""
        blocked_reason = stream.blocked_reason()
        if blocked_reason is not None:
            raise UnavailableError(f"{error}; {blocked_reason}") from None
        if num_migrations > self._migration_limit:
            raise UnavailableError(
                f"{error}; workers failed this request {num_migrations} times after its first token, more "
                f"than --migration-limit {self._migration_limit}"
            ) from None
        self.num_migrations += 1

    def _has_fresh_worker(self, routing: RoutingRequest) -> bool:
        """Returns True if a ready worker has not failed at this request yet."""
        return any(worker.id not in routing.tried for worker in self._dispatcher.ready_for(routing))

    async def _routing_request(self, request: ExternalRequest) -> RoutingRequest:
        headers, model = request.call.headers, request.model
        priority, session, salt = request.get("priority"), request.get("user"), request.get("cache_salt")
        if b"x-session-id" in headers:
            session = headers[b"x-session-id"].decode("latin-1")
        adapters = [worker.info.adapters for worker in self._dispatcher.workers.values()]
        is_adapter = any(model in names for names in adapters)
        return RoutingRequest(
            # Clients may send one request id twice.
            f"{request.call.line.id}-{next(self._numbers)}",
            await self._prompt_tokens(request),
            priority=priority if isinstance(priority, int) else 0,
            session=session if isinstance(session, str) else None,
            cache_salt=salt if isinstance(salt, str) else None,
            lora_name=model if is_adapter else None,
            tags=frozenset(tags_of(headers)),
        )

    async def _prompt_tokens(self, request: ExternalRequest) -> Sequence[int]:
        body = request.call.body
        if request.path not in (COMPLETIONS, CHAT):
            return text_numbers(body)
        if len(body) < LARGE_BODY:
            prompt = request.select(PROMPT_FIELDS)
        else:
            prompt = await asyncio.to_thread(request.select, PROMPT_FIELDS)
        try:
            return await self._tokens.tokens_of(prompt)
        except RequestError:  # the worker will refuse it
            return text_numbers(body)


def _count_cached(assignment: Assignment[ExternalLink], num_cached: int, num_tokens: int) -> None:
    """Adds the cached share of the prompt's `num_tokens` tokens to the router's counts. The router's own
    token count differs from the worker's if it has numbers in place of tokens."""
    assignment.cached(num_cached * assignment.num_prompt_tokens // max(1, num_tokens))


def _move(exchange: ExternalExchange, stream: ExternalStream) -> bool:
    if stream.has_begun:
        return False
    exchange.abort(MovedError("it waits there, and another worker would run it at once"))
    return True


def _bytes(header: str) -> bytes:
    """Returns the header's bytes as the worker sent them: aiohttp decodes headers this way."""
    return header.encode("utf-8", "surrogateescape")


def _content_type(exchange: ExternalExchange) -> str:
    return exchange.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_about_our_fields(exchange: ExternalExchange, error: bytes) -> bool:
    named = b"return_token_ids" in error or b"stream_options" in error
    return exchange.status in REFUSED_FIELD and named


def _shown(error: bytes) -> str:
    return error[:MAX_ERROR_BYTES].decode("utf-8", "replace")


async def _once(body: bytes) -> AsyncGenerator[bytes]:
    yield body
