"""Requests that are answered by a stream of messages, over any plane's publish and subscribe.

Caller and server each have an inbox, a subject of their own. A call goes to the subject of what is called:

    caller -> server   Open, Credit (as messages are read), Stop (cancel)
    server -> caller   Opened, Item 0, Item 1, ..., End (with a failure, or none)
    both, at intervals Alive: the streams that I have with you

The server may be at most WINDOW messages ahead of the reader. A stream ends exactly once: by End, by its
reader, or by PeerGone where the other side was silent for a lease or messages were lost on the way. Losses
are seen by gaps in the numbers, and by streams that the other side no longer names. An Alive may arrive after
the Open of a stream that is younger, so rounds of them are numbered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.errors import ShoalError
from shoal.fleet.clock import Clock
from shoal.fleet.registry.subscription import Reader, encode
from shoal.fleet.tasks import start, stop
from shoal.wire import Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

WINDOW = 64  # messages of a stream that are on their way or wait to be read


class PeerGone(ShoalError):
    """The other side of a stream died, cannot be reached, or lost messages of the stream."""


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


class Open(_Message, frozen=True):
    stream_id: str
    caller: str  # the inbox
    payload: bytes
    num_alive: int  # rounds of Alive that its sender has made before; only later ones name the stream


class Opened(_Message, frozen=True):
    stream_id: str
    server: str  # the inbox
    num_alive: int  # as in Open


class Item(_Message, frozen=True):
    stream_id: str
    number: int
    payload: bytes


class End(_Message, frozen=True):
    stream_id: str
    number: int  # of items before
    failure: Failure | None = None


class Credit(_Message, frozen=True):
    stream_id: str
    num_read: int  # since the last Credit


class Stop(_Message, frozen=True):
    stream_id: str


class Alive(_Message, frozen=True):
    sender: str  # the inbox
    number: int  # of the sender's round, from 1 on
    called: list[str]  # streams that the sender reads
    served: list[str]  # streams that the sender writes


InboxMessage = Opened | Item | End | Credit | Stop | Alive
Handler = Callable[[T], AsyncGenerator[msgspec.Struct, None]]


class Messages(Protocol):
    """What streams need of a plane."""

    async def send(self, subject: str, payload: bytes) -> None: ...

    async def listen(self, subject: str, take: Callable[[bytes], None]) -> Callable[[], None]:
        """Returns how to stop listening."""


class Stream(Generic[A]):
    """The caller's side: `async for message in stream`. It raises what the server raised, or PeerGone.
    `close` cancels the rest at the server; whoever stops reading early must call it."""

    def __init__(self, stream_id: str, kind: str, type_: type[A], streams: Streams) -> None:
        self.stream_id = stream_id
        self.server: str | None = None
        self.num_alive = 0  # rounds of the server's that do not name this stream
        self.heard_at = streams.clock.now()
        self._kind, self._type, self._streams = kind, type_, streams
        self._next = 0
        self._num_unconfirmed = 0
        self._items: deque[bytes] = deque()
        self._has_ended = False
        self._error: ShoalError | None = None
        self._changed = asyncio.Event()

    def take(self, message: Opened | Item | End) -> None:
        if isinstance(message, Opened):
            self.server, self.num_alive = message.server, message.num_alive
            return
        if message.number != self._next:
            self.fail(PeerGone(f"messages {self._next} to {message.number - 1} of a stream were lost"))
        elif isinstance(message, Item):
            self._items.append(message.payload)
            self._next += 1
            self._changed.set()
        else:
            self._end(message.failure.build() if message.failure else None)

    def fail(self, error: ShoalError) -> None:
        if not self._has_ended:
            self._streams.stop(self)
            self._end(error)

    def close(self) -> None:
        self._items.clear()
        if not self._has_ended:
            self._streams.stop(self)
            self._end(None)

    def _end(self, error: ShoalError | None) -> None:
        self._has_ended, self._error = True, error
        self._streams.forget(self.stream_id)
        self._changed.set()

    def __aiter__(self) -> Stream[A]:
        return self

    async def __anext__(self) -> A:
        while True:
            while self._items:
                message = self._streams.reader.read(self._kind, self._items.popleft(), self._type)
                self._count()
                if message is not None:
                    return message
            if self._has_ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    def _count(self) -> None:
        self._num_unconfirmed += 1
        if self._num_unconfirmed >= WINDOW // 2 and not self._has_ended and self.server:
            self._streams.post(self.server, Credit(self.stream_id, self._num_unconfirmed))
            self._num_unconfirmed = 0


class _Served:
    """The server's side of one stream."""

    def __init__(self, opened: Open, now: float) -> None:
        self.caller, self.num_alive, self.heard_at = opened.caller, opened.num_alive, now
        self.credit = asyncio.Semaphore(WINDOW)
        self.num_sent = 0
        self.task: asyncio.Task[None] | None = None


class Streams:
    """All streams of one process, both sides."""

    def __init__(self, messages: Messages, name: str, clock: Clock, lease_s: float, reader: Reader) -> None:
        """`name`: unique to this process."""
        self.clock, self.reader = clock, reader
        self.inbox = f"inbox.{name}"
        self._messages, self._lease_s = messages, lease_s
        self._num_called = self._num_alive = 0
        self._called: dict[str, Stream[Any]] = {}
        self._served: dict[str, _Served] = {}
        self._posts: asyncio.Queue[tuple[str, _Message]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: asyncio.Lock = asyncio.Lock()

    async def call(self, name: str, request: msgspec.Struct, type_: type[A]) -> Stream[A]:
        await self._start()
        self._num_called += 1
        stream = Stream(f"{self.inbox}.{self._num_called}", f"stream {name}", type_, self)
        self._called[stream.stream_id] = stream
        opening = Open(stream.stream_id, self.inbox, encode(request), self._num_alive)
        await self._messages.send(f"serve.{name}", encode(opening))
        return stream

    async def serve(self, name: str, type_: type[T], handler: Handler[T]) -> Callable[[], None]:
        """Returns how to stop taking new requests; streams that run go on."""
        await self._start()

        def take(payload: bytes) -> None:
            opened = self.reader.read(f"call of {name}", payload, Open)
            if opened is None or opened.stream_id in self._served:
                return
            served = self._served[opened.stream_id] = _Served(opened, self.clock.now())
            served.task = asyncio.create_task(self._answer(name, opened, served, type_, handler))
            served.task.add_done_callback(lambda task: self._end(name, opened, served, task))

        return await self._messages.listen(f"serve.{name}", take)

    async def close(self) -> None:
        """Streams that are called end with PeerGone, those that are served are cancelled."""
        for stream in list(self._called.values()):
            stream.fail(PeerGone("this process left the plane"))
        served = [served.task for served in self._served.values() if served.task]
        await stop(served)
        await asyncio.sleep(0)  # their callbacks post the ends
        while not self._posts.empty():
            await self._messages.send(*self._encoded(self._posts.get_nowait()))
        await stop(self._tasks)

    def post(self, subject: str, message: _Message) -> None:
        """Sends in order, without waiting. What is posted is bounded by the number of open streams."""
        self._posts.put_nowait((subject, message))

    def stop(self, stream: Stream[Any]) -> None:
        if stream.server:
            self.post(stream.server, Stop(stream.stream_id))

    def forget(self, stream_id: str) -> None:
        self._called.pop(stream_id, None)

    async def _start(self) -> None:
        async with self._starting:
            if not self._tasks:
                await self._messages.listen(self.inbox, self._take)
                self._tasks = [start(self._post_all()), start(self._live())]

    def _encoded(self, post: tuple[str, _Message]) -> tuple[str, bytes]:
        return post[0], encode(post[1])

    async def _post_all(self) -> None:
        while True:
            await self._messages.send(*self._encoded(await self._posts.get()))

    async def _answer(
        self, name: str, opened: Open, served: _Served, type_: type[T], handler: Handler[T]
    ) -> None:
        answer = Opened(opened.stream_id, self.inbox, self._num_alive)
        await self._messages.send(opened.caller, encode(answer))
        request = self.reader.read(f"request of {name}", opened.payload, type_)
        if request is None:
            raise ShoalError(f"{name} cannot read the request: it is no {type_.__name__}")
        async with aclosing(handler(request)) as messages:
            async for message in messages:
                await served.credit.acquire()
                item = Item(opened.stream_id, served.num_sent, encode(message))
                served.num_sent += 1
                await self._messages.send(opened.caller, encode(item))

    def _end(self, name: str, opened: Open, served: _Served, task: asyncio.Task[None]) -> None:
        failure = None
        if task.cancelled():
            failure = Failure.of(PeerGone("the server has cancelled the stream"))
        elif error := task.exception():
            if not isinstance(error, ShoalError):
                logger.error("a stream of %s failed", name, exc_info=error)
            failure = Failure.of(error)
        del self._served[opened.stream_id]
        self.post(opened.caller, End(opened.stream_id, served.num_sent, failure))

    def _take(self, payload: bytes) -> None:
        message = self.reader.read("stream", payload, InboxMessage)  # type: ignore[arg-type]
        if isinstance(message, Alive):
            self._hear(message)
        elif isinstance(message, Credit):
            served = self._served.get(message.stream_id)
            for _ in range(min(message.num_read, WINDOW) if served else 0):
                served.credit.release()  # type: ignore[union-attr]
        elif isinstance(message, Stop):
            self._cancel(message.stream_id)
        elif message is not None:
            stream = self._called.get(message.stream_id)
            if stream:
                stream.heard_at = self.clock.now()
                stream.take(message)
            elif isinstance(message, Opened):  # closed before it was opened
                self.post(message.server, Stop(message.stream_id))

    def _hear(self, alive: Alive) -> None:
        now = self.clock.now()
        theirs = set(alive.served)
        for stream in [stream for stream in self._called.values() if stream.server == alive.sender]:
            stream.heard_at = now
            if stream.stream_id not in theirs and alive.number > stream.num_alive:
                stream.fail(PeerGone("the server no longer knows the stream: its end was lost"))
        reads = set(alive.called)
        for stream_id, served in list(self._served.items()):
            if served.caller == alive.sender:
                served.heard_at = now
                if stream_id not in reads and alive.number > served.num_alive:
                    self._cancel(stream_id)

    def _cancel(self, stream_id: str) -> None:
        served = self._served.get(stream_id)
        if served and served.task:
            served.task.cancel()

    async def _live(self) -> None:
        """Tells all peers of what is open, three times a lease, and ends what has been silent for one."""
        ticked_at = self.clock.now()
        while True:
            await self.clock.sleep(self._lease_s / 3)
            now = self.clock.now()
            pause, ticked_at = now - ticked_at, now
            if pause > self._lease_s / 2:  # this process stood still: what came in that time is not read yet
                for stream in self._called.values():
                    stream.heard_at += pause
                for served in self._served.values():
                    served.heard_at += pause
            for stream in list(self._called.values()):
                if now - stream.heard_at >= self._lease_s:
                    stream.fail(PeerGone(f"no sign of life from the other side for {self._lease_s:g} s"))
            for stream_id, served in list(self._served.items()):
                if now - served.heard_at >= self._lease_s:
                    self._cancel(stream_id)
            peers = {stream.server for stream in self._called.values() if stream.server}
            peers |= {served.caller for served in self._served.values()}
            self._num_alive += 1
            for peer in peers:
                called = [key for key, stream in self._called.items() if stream.server in (peer, None)]
                served_ids = [key for key, served in self._served.items() if served.caller == peer]
                self.post(peer, Alive(self.inbox, self._num_alive, called, served_ids))
