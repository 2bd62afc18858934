"""`ForeignForwarder`: a client's request on its way to one foreign worker, and to another if that one fails.

Before the first token every failure is followed by another try, and the client sees none of it. After it a
stream of completions or chats goes on at another worker (foreign_stream.py). Any other answer ends there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from shoal.errors import BusyError, RequestError, UnavailableError, WorkerFailedError
from shoal.fleet.dispatcher import Dispatcher, Place, Wanted
from shoal.fleet.foreign_link import ForeignExchange, ForeignLink
from shoal.fleet.foreign_request import CHAT, COMPLETIONS, ForeignRequest
from shoal.fleet.foreign_stream import ForeignStream
from shoal.fleet.prompt_tokens import PROMPT_FIELDS, PromptTokens, text_numbers
from shoal.fleet.sse import SseReader
from shoal.fleet_api import ForeignAnswer, ForeignCall

STREAMS = ("text/event-stream", "application/x-ndjson")
REFUSED_FIELD = (400, 422)  # what a strict server answers to a field that it does not know
MIN_TRIES = 2  # of a request without a token, even if there is one worker alone
MAX_ERROR_BYTES = 1000
LARGE_BODY = 1 << 20  # bytes; one of this size is read in a thread
HALF = "\ufffd"  # what half a character is shown as
MOST_HALF_TOKENS = 4  # of a character that is not whole


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Whole(msgspec.Struct):
    """What the books want of an answer that is no stream."""

    usage: _Usage | None = None


class _Head:
    """What an answer begins with."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_type = b"application/json"

    def fill(self, exchange: ForeignExchange, worker_id: str) -> None:
        self.status = exchange.status
        self.content_type = exchange.headers.get("content-type", "application/json").encode("latin-1")
        self.headers = [(b"x-shoal-worker", worker_id.encode("ascii"))]
        if "retry-after" in exchange.headers:
            self.headers.append((b"retry-after", exchange.headers["retry-after"].encode("latin-1")))


class ForeignForwarder:
    """The foreign workers of one model."""

    def __init__(
        self, dispatcher: Dispatcher[ForeignLink], tokens: PromptTokens, *, migration_limit: int
    ) -> None:
        """migration_limit: how many workers may fail one request after its first token."""
        self.num_migrations = 0  # of streams that went on at another worker
        self.num_retries = 0  # of requests without a token
        self._dispatcher, self._tokens = dispatcher, tokens
        self._migration_limit = migration_limit
        self._numbers = itertools.count()

    async def forward(self, call: ForeignCall) -> ForeignAnswer:
        """As Forwarder says. `chunks` raises WorkerFailedError and UnavailableError for a stream that breaks
        and cannot be taken up elsewhere."""
        head = _Head()
        if len(call.body) < LARGE_BODY:
            request = ForeignRequest(call)
        else:
            request = await asyncio.to_thread(ForeignRequest, call)
        chunks = self._chunks(request, head)
        await anext(chunks)
        return ForeignAnswer(head.status, head.headers, chunks, head.content_type)

    async def _chunks(self, request: ForeignRequest, head: _Head) -> AsyncGenerator[bytes]:
        """Yields an empty piece once `head` is filled, and then the answer's bytes."""
        wanted = await self._wanted(request)
        stream = ForeignStream(request)
        num_failures = num_migrations = 0
        while True:
            place: Place[ForeignLink] | None = None
            try:
                async with (
                    self._dispatcher.place(wanted) as place,
                    aclosing(self._ask(place, stream, head)) as pieces,
                ):
                    async for piece in pieces:
                        yield piece
                return
            except BusyError:
                if place is None:  # the router's own queue is full
                    raise
            except WorkerFailedError as error:
                stream.break_off()
                if stream.has_begun and not stream.has_finished and stream.obstacle() is None:
                    await self._settle(stream)
                if stream.is_whole:
                    yield stream.finish()
                    return
                if stream.has_begun:
                    num_migrations += 1
                    self._check_migration(stream, num_migrations, error)
                    wanted.token_ids = stream.go_on()
                else:
                    num_failures += 1
                    if num_failures >= MIN_TRIES and not self._has_fresh_worker(wanted):
                        raise
                    self.num_retries += 1

    async def _ask(
        self, place: Place[ForeignLink], stream: ForeignStream, head: _Head
    ) -> AsyncGenerator[bytes]:
        """Sends the request to a worker and yields what the client gets of its answer. Raises BusyError if
        the worker is full, and WorkerFailedError."""
        link, request = place.worker.link, stream.request
        headers = request.headers()
        if place.worker.info.dp_size > 1:  # vLLM's header
            headers["X-data-parallel-rank"] = str(place.choice.rank.rank)
        while True:
            is_as_it_came, path, body = self._to_send(stream, link)
            exchange = link.exchange(request.call.method, path, body, headers)
            place.on_broken = exchange.abort
            async with exchange:
                error = await self._refusal(exchange, link)
                if error is not None and not is_as_it_came and _is_about_our_fields(exchange, error):
                    link.takes_token_ids = False
                    continue
                if error is not None and stream.has_begun:
                    raise UnavailableError(
                        f"the stream broke, and another worker refuses to take it up: {_shown(error)}"
                    )
                if error is not None:
                    pieces = _once(error)
                elif request.has_chunks and _content_type(exchange) in STREAMS:
                    pieces = self._read_chunks(exchange, place, stream)
                elif _content_type(exchange) in STREAMS:
                    pieces = self._read_stream(exchange, place)
                else:
                    pieces = self._read_whole(exchange, place)
                async with aclosing(pieces):
                    async for piece in pieces:
                        if not head.headers:
                            head.fill(exchange, place.worker.id)
                            yield b""
                        stream.has_begun = True
                        yield piece
                return

    def _to_send(self, stream: ForeignStream, link: ForeignLink) -> tuple[bool, str, bytes]:
        """Whether the body is as it came, the path and the body."""
        request = stream.request
        if stream.has_begun:
            room = link.max_model_len(request.model)
            return False, COMPLETIONS, request.next_body(stream.prompt_ids or [], stream.token_ids, room)
        if request.obstacle is not None or not link.takes_token_ids:
            return True, request.call.path, request.call.body
        return False, request.call.path, request.first_body()

    async def _refusal(self, exchange: ForeignExchange, link: ForeignLink) -> bytes | None:
        """The body of an answer that refuses the request; None if it does not. Raises BusyError and
        WorkerFailedError for those that are not about the request."""
        status = exchange.status
        if status < 300:
            return None
        if status == 429:
            raise link.busy(exchange.headers.get("retry-after"))
        body = await exchange.whole()
        if status == 401:  # the client has shown its own key to the router, and knows no other
            raise link.failure("it refuses the router's key, or wants one; give it by api_key_file=")
        if status < 400 or status >= 500:
            raise link.failure(f"it answers {status}: {_shown(body)}")
        return body

    async def _read_chunks(
        self, exchange: ForeignExchange, place: Place[ForeignLink], stream: ForeignStream
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
                    place.generated(num_tokens)
                if stream.is_done and stream.cached_tokens is not None:
                    _tell_cached(place, *stream.cached_tokens)
                if shown := b"".join(events):  # what came before a failure counts as sent
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
            raise WorkerFailedError(f"the worker {place.worker.id} ended its stream before the end")
        yield stream.finish()  # some servers send no [DONE]

    async def _read_stream(
        self, exchange: ForeignExchange, place: Place[ForeignLink]
    ) -> AsyncGenerator[bytes]:
        """Any other stream, as it is."""
        async with aclosing(exchange.pieces()) as pieces:
            async for piece in pieces:
                place.generated(1)
                yield piece

    async def _read_whole(
        self, exchange: ForeignExchange, place: Place[ForeignLink]
    ) -> AsyncGenerator[bytes]:
        body = await exchange.whole()
        place.generated(1)
        try:
            usage = msgspec.json.decode(body, type=_Whole).usage
        except ValueError:
            usage = None
        if usage is not None and usage.prompt_tokens and usage.prompt_tokens_details is not None:
            _tell_cached(place, usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens)
        yield body

    async def _settle(self, stream: ForeignStream) -> None:
        """Finds out which tokens the text that was sent is of. Workers hold text back that may begin a stop
        string, and a chunk of several tokens may end with half a character. Raises UnavailableError if nobody
        can say and it matters."""
        request, ids, sent = stream.request, stream.token_ids, stream.text
        model, prompt_ids = request.model, stream.prompt_ids or []
        text = whole = await self._tokens.text_of(model, prompt_ids, ids)
        count = len(ids)
        least = count if request.wants_token_ids else max(0, count - MOST_HALF_TOKENS)
        while text is not None and text.endswith(HALF) and count > least:
            count -= 1
            text = await self._tokens.text_of(model, prompt_ids, ids[:count])
        if text is not None and text.startswith(sent) and not text.endswith(HALF):
            stream.settle(count, text[len(sent) :])
        elif whole is not None and whole.startswith(sent):  # bytes that are no text, as vLLM shows them
            stream.settle(len(ids), whole[len(sent) :].rstrip(HALF))
        elif any(len(stop) > 1 for stop in request.stops):
            raise UnavailableError(
                "the stream broke, and nobody can tell the text of its tokens (/detokenize, --tokenizer), of "
                "which some may have been held back as they may begin a stop string"
            )

    def _check_migration(self, stream: ForeignStream, num_migrations: int, error: WorkerFailedError) -> None:
        """Raises UnavailableError if the stream ends here."""
        obstacle = stream.obstacle()
        if obstacle is not None:
            raise UnavailableError(f"{error}; {obstacle}") from None
        if num_migrations > self._migration_limit:
            raise UnavailableError(
                f"{error}; workers failed this request {num_migrations} times after its first token, and the "
                f"limit is {self._migration_limit} (--migration-limit)"
            ) from None
        self.num_migrations += 1

    def _has_fresh_worker(self, wanted: Wanted) -> bool:
        """Whether there is a worker that could take the request, and has not failed at it."""
        return any(worker.id not in wanted.tried for worker in self._dispatcher.ready_for(wanted))

    async def _wanted(self, request: ForeignRequest) -> Wanted:
        headers, model = request.call.headers, request.model
        priority, session, salt = request.get("priority"), request.get("user"), request.get("cache_salt")
        if b"x-session-id" in headers:
            session = headers[b"x-session-id"].decode("latin-1")
        tags = headers.get(b"x-shoal-tags", b"").decode("latin-1")
        adapters = [worker.info.adapters for worker in self._dispatcher.workers.values()]
        is_adapter = any(model in names for names in adapters)
        return Wanted(
            # Clients may send one request id twice.
            f"{request.call.request_id}-{next(self._numbers)}",
            await self._prompt_tokens(request),
            priority=priority if isinstance(priority, int) else 0,
            session=session if isinstance(session, str) else None,
            cache_salt=salt if isinstance(salt, str) else None,
            lora_name=model if is_adapter else None,
            tags=frozenset(tag for one in tags.split(",") if (tag := one.strip())),
        )

    async def _prompt_tokens(self, request: ForeignRequest) -> Sequence[int]:
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


def _tell_cached(place: Place[ForeignLink], num_cached: int, num_tokens: int) -> None:
    """Of `num_tokens` tokens of the prompt so many were cached. The router may have counted others, where
    numbers stand for the text."""
    place.cached(num_cached * place.num_prompt_tokens // max(1, num_tokens))


def _content_type(exchange: ForeignExchange) -> str:
    return exchange.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_about_our_fields(exchange: ForeignExchange, error: bytes) -> bool:
    named = b"return_token_ids" in error or b"stream_options" in error
    return exchange.status in REFUSED_FIELD and named


def _shown(error: bytes) -> str:
    return error[:MAX_ERROR_BYTES].decode("utf-8", "replace")


async def _once(body: bytes) -> AsyncGenerator[bytes]:
    yield body
