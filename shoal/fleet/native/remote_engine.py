"""`RemoteEngine`: a router's client of one native worker: an Engine with its Control, and a Link. The other
end is WorkerServer (worker_server.py); the messages are in worker_wire.py.

It connects, and reconnects, by itself. Requests in flight when the connection breaks end with
WorkerFailedError: another worker may continue them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from shoal.api import Output, Request
from shoal.collector import Collector
from shoal.control import Command, Control, name_of, result_type
from shoal.errors import BusyError, ConfigError, RequestError, ShoalError, WorkerFailedError
from shoal.fleet.index.event_feed import EventFeed
from shoal.fleet.key import FleetKey
from shoal.fleet.native.socket_reader import SocketReader
from shoal.fleet.native.worker_wire import (
    HEARTBEAT_MS,
    SILENCE_MS,
    AskEvents,
    ChangeRole,
    Hello,
    KvBatch,
    KvReplayed,
    KvReplayEnded,
    Report,
    decode_from_worker,
    encode,
)
from shoal.fleet.worker import WorkerInfo, WorkerLoad
from shoal.model_card import ModelCard
from shoal.sampling_params import SamplingParams
from shoal.stats import Stats
from shoal.wire import Abort, Add, Call, CoreCommand, Message, Outputs, ReadStats, Refused, Reply, TakeBackKv

T = TypeVar("T")

CONNECT_S = 1.0  # after this long without a connection a check fails

logger = logging.getLogger(__name__)


class RemoteStream:
    """One request's outputs. `has_ended` becomes True with the last one."""

    def __init__(self, request_id: str, leave: Callable[[RemoteStream], None]) -> None:
        self.request_id, self._leave = request_id, leave
        self.collector = Collector()
        self.has_ended = False

    async def get(self) -> Output:
        """Returns all output since the last call. Raises the error that ended the request."""
        output = await self.collector.get()
        self.has_ended = output.finish_reason is not None
        return output

    @property
    def is_under_way(self) -> bool:
        """True until the end of the request has arrived."""
        waiting = self.collector.output
        ends = waiting is not None and waiting.finish_reason is not None
        return not (ends or self.has_ended or self.collector.error is not None)

    def close(self) -> None:
        """Aborts the request if it has not ended. Must be called once."""
        self._leave(self)


class RemoteEngine(Control):
    """A native worker as an Engine. `info` and `card` describe it. Must be used in the event loop that it was
    built in.

    `report` is the worker's last report. `on_report` is called with each report, `on_outputs` when tokens
    arrive, and `on_lost` when the connection breaks.
    """

    def __init__(self, info: WorkerInfo, card: ModelCard, address: str, key: FleetKey | None) -> None:
        """address: the worker's, tcp://HOST:PORT. Raises ConfigError for a malformed one."""
        self.info, self.card, self.address = info, card, address
        self.report: Report | None = None
        self.on_report: Callable[[Report], None] = lambda report: None
        self.on_outputs: Callable[[], None] = lambda: None
        self.on_lost: Callable[[WorkerFailedError], None] = lambda error: None
        self._has_warned = False  # about a message that could not be read
        self._streams: dict[str, RemoteStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._feed: EventFeed | None = None
        self._replayed = asyncio.Event()  # the requested replay has ended or failed
        self._stepped = asyncio.Event()  # a report shows that the engine has computed something
        self._is_connected = False  # the worker has answered Hello on this connection
        self._connected = asyncio.Event()
        self._hello: asyncio.TimerHandle | None = None  # sends Hello again
        self._is_closed = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket: zmq.Socket[bytes] = self._socket
        socket.immediate = True  # messages to a disconnected worker are not queued
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = (
            HEARTBEAT_MS,
            SILENCE_MS,
            SILENCE_MS,
        )
        socket.ipv6 = "[" in address
        if key is not None:
            key.protect_client(socket)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._reader = SocketReader(socket, self._take)
        self._monitor_reader = SocketReader(self._monitor, self._take_event)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"the address of a worker must be tcp://HOST:PORT, got {address!r}: {error}"
            ) from None

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    async def wait_connected(self) -> None:
        """Returns once the worker has answered Hello on a connection."""
        await self._connected.wait()

    # Engine

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        stream = self.open(request)
        try:
            while not stream.has_ended:
                yield await stream.get()
        finally:
            stream.close()

    def open(self, request: Request) -> RemoteStream:
        """Like `generate`, without the cost of an async generator per token. Raises WorkerFailedError if the
        worker is not connected, and RequestError."""
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(
                f"request_id must be unused, got {request_id!r} of a running request; choose another",
                field="request_id",
            )
        try:
            self._send(Add(request, time.monotonic() - request.arrival))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the request cannot be sent to a worker: {error}") from None
        stream = self._streams[request_id] = RemoteStream(request_id, self._leave)
        return stream

    async def abort(self, request_id: str) -> None:
        self.send_abort(request_id)

    def send_abort(self, request_id: str) -> None:
        """Like `abort`, without awaiting. A disconnected worker has aborted the request already."""
        with contextlib.suppress(WorkerFailedError):
            self._send(Abort([request_id]))

    async def stats(self) -> Stats:
        return await self._call(ReadStats())

    def send(self, command: Command[Any]) -> None:
        """Sends a command without waiting for its answer. A disconnected worker gets none."""
        with contextlib.suppress(WorkerFailedError):
            self._send(Call(next(self._call_ids), cast(CoreCommand, command)))

    def break_off(self, request_id: str, error: ShoalError) -> None:
        """Raises the error in the reader of this request, and aborts it at the worker."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.collector.error is None:
            stream.collector.fail(error)
            self.send_abort(request_id)

    def _leave(self, stream: RemoteStream) -> None:
        """Forgets a stream that is not read any more, and aborts its request."""
        del self._streams[stream.request_id]
        if stream.collector.output is not None:
            self._take_back(stream.collector.output)
        if stream.is_under_way:
            self.send_abort(stream.request_id)

    def _take_back(self, output: Output) -> None:
        """Returns the KV ticket of an output that nobody reads."""
        if output.kv_ticket is not None:
            self.send(TakeBackKv(output.kv_ticket))

    # Control

    async def control(self, command: Command[T]) -> T:
        return await self._call(command)

    async def change_role(self, role: str) -> None:
        """Raises ConfigError if the worker cannot have this role."""
        call_id = next(self._call_ids)
        await self._answer_to(call_id, ChangeRole(call_id, role))

    # Link

    async def check(self) -> WorkerInfo:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.wait_connected()
        except TimeoutError:
            raise WorkerFailedError(f"worker {self.info.id} is not reached", is_absent=True) from None
        try:
            await self.stats()
        except WorkerFailedError:
            raise
        except ShoalError as error:
            raise WorkerFailedError(f"worker {self.info.id}: {error}") from None
        return self.info

    async def canary(self) -> None:
        """Returns with the token, or when the worker has computed anything: the token may have to wait for
        long prompts."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        name, embeds = f"canary-{next(self._call_ids)}", not self.card.info.generates
        request = Request(name, [0], params, embed=embeds)
        self._stepped.clear()
        steps = asyncio.create_task(self._stepped.wait())
        token = asyncio.create_task(_read_all(self.generate(request)))
        try:
            await asyncio.wait((steps, token), return_when=asyncio.FIRST_COMPLETED)
            if token.done():
                token.result()
        except (BusyError, WorkerFailedError):
            raise
        except ShoalError as error:
            raise WorkerFailedError(f"worker {self.info.id}: {error}") from None
        finally:
            steps.cancel()
            token.cancel()

    async def loads(self) -> list[WorkerLoad]:
        return self.current_loads()

    def current_loads(self) -> list[WorkerLoad]:
        """Returns the load of the last report; [] before the first one."""
        if self.report is None:
            return []
        stats = self.report.stats
        return [
            WorkerLoad(
                num_running=stats.num_running, num_waiting=stats.num_waiting, kv_usage=stats.kv_cache_usage
            )
        ]

    async def close(self) -> None:
        """Ends requests in flight with WorkerFailedError."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lose("the worker has left the fleet")
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._reader.close()
        self._monitor_reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    # KV events

    async def follow_events(self, feed: EventFeed) -> None:
        """Feeds the worker's KV events to `feed`, past ones first, until it is cancelled."""
        self._feed = feed
        try:
            while True:
                await self.wait_connected()
                feed.missing.clear()
                if feed.replay_from is not None:
                    self._replayed.clear()
                    with contextlib.suppress(WorkerFailedError):  # `_lose` follows
                        self._send(AskEvents(feed.replay_from))
                    await self._replayed.wait()
                else:
                    await feed.missing.wait()
        finally:
            self._feed = None

    # Inside

    def _send(self, message: Message) -> None:
        """Raises WorkerFailedError if the worker is not connected."""
        if not self._is_connected:
            raise WorkerFailedError(f"worker {self.info.id} is not reached", is_absent=True)
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise WorkerFailedError(f"worker {self.info.id} is not reached", is_absent=True) from None
        self._reader.poll()

    async def _call(self, command: Command[T]) -> T:
        call_id = next(self._call_ids)
        reply = await self._answer_to(call_id, Call(call_id, cast(CoreCommand, command)))
        try:
            return msgspec.convert(reply, result_type(command))
        except msgspec.ValidationError as error:
            raise WorkerFailedError(
                f"worker {self.info.id}: its answer to {name_of(command)} cannot be read ({error}); does it "
                "run another version?"
            ) from None

    async def _answer_to(self, call_id: int, message: Message) -> Any:
        self._send(message)
        reply = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            del self._calls[call_id]

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_worker(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("messages of worker %s cannot be read: %s", self.info.id, error)
            return
        if isinstance(message, Outputs):
            self.on_outputs()
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.collector.put(output)
                else:  # not read any more
                    self._take_back(output)
        elif isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, KvBatch | KvReplayed | KvReplayEnded):
            self._take_events(message)
        elif isinstance(message, Refused):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.collector.fail(message.error.build())
        elif isinstance(message, Reply):
            self._take_reply(message)

    def _take_report(self, report: Report) -> None:
        if self.report is not None and report.stats.step_tokens > self.report.stats.step_tokens:
            self._stepped.set()
        self.report = report
        if not self._is_connected:
            self._is_connected = True
            self._connected.set()
        self.on_report(report)

    def _take_reply(self, reply: Reply) -> None:
        waiting = self._calls.get(reply.call_id)
        if waiting is None or waiting.done():  # the caller does not wait any more
            return
        if reply.error is None:
            waiting.set_result(reply.result)
        else:
            waiting.set_exception(reply.error.build())

    def _take_events(self, message: KvBatch | KvReplayed | KvReplayEnded) -> None:
        feed = self._feed
        if feed is None:
            return
        if isinstance(message, KvBatch):
            feed.receive(message.number, message.payload)
        elif isinstance(message, KvReplayed):
            feed.replayed(message.number, message.payload)
        else:
            feed.replay_ended()
            self._replayed.set()

    def _take_event(self, frames: list[bytes]) -> None:
        """Handles an event of libzmq's socket monitor."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._say_hello()
        elif event == zmq.EVENT_DISCONNECTED:
            self._reader.read_all()
            self._lose("the connection broke")

    def _say_hello(self) -> None:
        if self._is_connected or self._is_closed:
            return
        with contextlib.suppress(zmq.ZMQError):  # not ready yet, or lost again
            self._socket.send(encode(Hello(self.info.id)), zmq.NOBLOCK)
        self._reader.poll()
        if self._hello is not None:  # from an earlier connection
            self._hello.cancel()
        self._hello = asyncio.get_running_loop().call_later(CONNECT_S, self._say_hello)

    def _lose(self, why: str) -> None:
        was_connected, self._is_connected = self._is_connected, False
        self._connected.clear()
        self._replayed.set()
        if self._feed is not None:
            self._feed.check()  # events must be requested again on the next connection
        error = WorkerFailedError(f"worker {self.info.id}: {why}", is_absent=True)
        for stream in self._streams.values():
            if stream.collector.error is None:
                stream.collector.fail(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)
        if was_connected:
            self.on_lost(error)


async def _read_all(outputs: AsyncGenerator[Output, None]) -> None:
    async with aclosing(outputs):
        async for _ in outputs:
            pass
