"""`WorkerServer`: a native worker's port for routers: requests in; outputs, KV events and reports out. The
other end is RemoteEngine (remote_engine.py); the messages are in worker_wire.py.

It is one ZMQ socket. Tokens do not pass through the registry: they would cross its hub or server, and each
would be a message there. Here all outputs of one step go to a router in one message. A router that is gone
takes its requests with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from shoal import wire
from shoal.api import FinishReason, Output, Request
from shoal.collector import merge
from shoal.control import Command, ServedEngine, UpdateWeights
from shoal.errors import ConfigError, ShoalError, UnavailableError, UserError
from shoal.fleet.clock import Clock
from shoal.fleet.key import FleetKey
from shoal.fleet.native.socket_reader import SocketReader
from shoal.fleet.native.worker_wire import (
    HEARTBEAT_MS,
    REPORT_S,
    SILENCE_MS,
    AskEvents,
    ChangeRole,
    Hello,
    KvBatch,
    KvReplayed,
    KvReplayEnded,
    Report,
    decode_to_worker,
    encode,
)
from shoal.hosts import is_loopback
from shoal.kv_events import END
from shoal.stats import SleepState, Stats
from shoal.telemetry.logs import Event, about
from shoal.telemetry.metrics import ModelMetrics, RequestTimes
from shoal.telemetry.served import totals_of
from shoal.telemetry.timeline import Timeline
from shoal.telemetry.tracing import Tracing
from shoal.wire import Abort, Add, Call, Failure, FlushKv, Message, Outputs, ReadStats, Refused, Reply

logger = logging.getLogger(__name__)

REPLAY_PATIENCE_S = 10.0  # a replay without a batch for this long has ended
MAX_WAITING_BATCHES = 10_000  # batches of KV events queued from the engine
LINGER_MS = 500
MAX_MESSAGE_BYTES = 64 << 20  # libzmq closes connections of routers that announce more


class Gate(Protocol):
    """Admission of requests, shared with the worker's HTTP server."""

    def enter(self, count: int) -> None:
        """Raises RequestError, BusyError, UnavailableError."""
        ...

    def leave(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The sockets on which this worker's engine publishes its KV events."""

    publisher: str
    replay: str


@dataclass(eq=False)
class _RouterConnection:
    """One router's connection."""

    routing_id: bytes
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by the router's request id
    own_ids: dict[str, str] = field(default_factory=dict)  # by the router's request id
    outputs: dict[str, Output] = field(default_factory=dict)  # not sent yet, by the router's request id
    ends: list[Refused] = field(default_factory=list)  # to be sent after the outputs
    is_flushing: bool = False
    follows_events: bool = False


class WorkerServer:
    """Built by `open`. `address` is the address for routers."""

    def __init__(
        self,
        worker_id: str,
        engine: ServedEngine,
        gate: Gate,
        metrics: ModelMetrics,
        clock: Clock,
        tracing: Tracing | None,
    ) -> None:
        self.worker_id, self._tracing = worker_id, tracing
        self.address = ""
        self.weights_version = 0
        self._has_warned = False  # about a message that could not be read
        self.on_role: Callable[[str], Awaitable[None]] | None = None  # changes the worker's role
        self._engine, self._gate, self._metrics, self._clock = engine, gate, metrics, clock
        self._report = Report(Stats(), SleepState(), 0)  # the last report
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._routers: dict[bytes, _RouterConnection] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._reader: SocketReader | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._subscriber: tuple[zmq.Socket[bytes], SocketReader] | None = None
        self._replayer: tuple[zmq.Socket[bytes], SocketReader] | None = None
        self._asked: list[tuple[_RouterConnection, int]] = []  # replays to be done; the first is in progress
        self._replay_timer: asyncio.TimerHandle | None = None

    @classmethod
    def open(
        cls,
        worker_id: str,
        engine: ServedEngine,
        gate: Gate,
        metrics: ModelMetrics,
        clock: Clock,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: FleetKey | None = None,
        events: EventEndpoints | None = None,
        tracing: Tracing | None = None,
    ) -> WorkerServer:
        """Opens the port. port: 0 for any free one. tracing: gets the worker's part of a request's trace.
        Raises ConfigError for an address that cannot be opened, or that other machines reach without a
        key."""
        check_host(host, key)
        self = cls(worker_id, engine, gate, metrics, clock, tracing)
        listener = self._socket
        listener.router_mandatory = True
        listener.sndhwm = listener.rcvhwm = 0  # queued messages are bounded by the running requests
        listener.maxmsgsize = MAX_MESSAGE_BYTES
        listener.linger = LINGER_MS
        listener.heartbeat_ivl, listener.heartbeat_timeout, listener.heartbeat_ttl = (
            HEARTBEAT_MS,
            SILENCE_MS,
            SILENCE_MS,
        )
        listener.ipv6 = ":" in host
        try:
            if key is not None:
                self._authenticator = key.authenticate(self._context)
                key.protect_server(listener)
            bound = f"[{host}]" if ":" in host else host
            listener.bind(f"tcp://{bound}:{port or '*'}")
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"fleet_port must be a free port of {host!r}, got {port}: {error}; choose another"
            ) from None
        self.address = listener.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader = SocketReader(listener, self._take)
        if events is not None:
            self._follow_engine(events)
        self._start(self._report_on())
        return self

    def address_seen_from(self, host: str | None) -> str:
        """Returns the address for a router that runs on this host or is reached through it. It depends on the
        host if the port listens on all addresses of the machine."""
        own, _, number = self.address.removeprefix("tcp://").rpartition(":")
        if own not in ("0.0.0.0", "[::]"):
            return self.address
        family = socket.AF_INET if own == "0.0.0.0" else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host or "127.0.0.1", 9))  # sends nothing, but chooses the address to send from
                found = probe.getsockname()[0]
            except OSError:
                found = socket.gethostname()
        return f"tcp://[{found}]:{number}" if ":" in found else f"tcp://{found}:{number}"

    async def close(self) -> None:
        """Ends all requests; routers learn that the worker is gone."""
        tasks = [task for router in self._routers.values() for task in router.tasks.values()]
        for task in (*tasks, *self._background):
            task.cancel()
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
        readers = [self._reader, *(pair[1] for pair in (self._subscriber, self._replayer) if pair)]
        for reader in readers:
            if reader is not None:
                reader.close()
        for pair in (self._subscriber, self._replayer):
            if pair is not None:
                pair[0].close(linger=0)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # after LINGER_MS at the latest

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # From routers

    def _take(self, frames: list[bytes]) -> None:
        routing_id, data = frames[0], frames[-1]
        try:
            message = decode_to_worker(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._take_unreadable(routing_id, data, error)
            return
        if isinstance(message, Hello):
            if message.worker_id == self.worker_id and routing_id not in self._routers:
                self._routers[routing_id] = _RouterConnection(routing_id)
                self._send(self._routers[routing_id], self._report)  # shows the router that it is connected
                self._start(self._report_once())
            return
        router = self._routers.get(routing_id)
        if router is None:  # it sent no Hello: it gets no answer
            return
        if isinstance(message, Add):
            # The routers' clocks differ, and requests of equal priority run in the order of their arrival.
            message.request.arrival = time.monotonic() - (message.age_s or 0.0)
            self._add(router, message.request)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                if request_id in router.own_ids:
                    self._start(self._engine.abort(router.own_ids[request_id]))
        elif isinstance(message, Call):
            self._start(self._reply(router, message.call_id, self._carry_out(message.command)))
        elif isinstance(message, ChangeRole):
            self._start(self._reply(router, message.call_id, self._change_role(message.role)))
        elif isinstance(message, AskEvents):
            self._ask_replay(router, message.start)

    def _take_unreadable(self, routing_id: bytes, data: bytes, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a message to this worker cannot be read (further ones are not logged): %s", error)
        router = self._routers.get(routing_id)
        try:
            answer = wire.refusal(data, error)
        except (msgspec.DecodeError, LookupError, TypeError):
            return
        if router is not None and answer is not None:
            self._send(router, answer)

    # Requests

    def _add(self, router: _RouterConnection, request: Request) -> None:
        request_id = request.request_id
        if request_id in router.tasks:
            error = ShoalError(f"request_id must be unused, got {request_id!r} of a running request")
            self._send(router, Refused(request_id, Failure.of(error)))
            return
        # Two routers may use the same id, but the engine needs unique ones.
        request.request_id = router.own_ids[request_id] = f"{request_id}/{next(self._numbers)}"
        if request.continues is not None:
            request.continues = router.own_ids.get(request.continues)
        task = self._loop.create_task(self._run(router, request_id, request))
        router.tasks[request_id] = task

    async def _run(self, router: _RouterConnection, request_id: str, request: Request) -> None:
        try:
            count = 0 if request.fetches_only else 1  # a prefetch request and its continuation count once
            self._gate.enter(count)
            try:
                await self._stream(router, request_id, request)
            finally:
                self._gate.leave(count)
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception(about(request.log_id, "of a router failed"))
            else:
                text = f"of a router is not answered: {type(error).__name__}"
                logger.debug(about(request.log_id, text))
            router.ends.append(Refused(request_id, Failure.of(error)))
            self._flush_soon(router)
        finally:
            del router.tasks[request_id], router.own_ids[request_id]

    async def _stream(self, router: _RouterConnection, request_id: str, request: Request) -> None:
        times = self._metrics.begin(request)
        if request.fetches_only:
            times.forget()
        moves_kv = request.offers_kv or request.kv_ticket is not None
        part = (
            None if self._tracing is None else _WorkerTrace(request, self._metrics.labels[0], self._tracing)
        )
        try:
            async with aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    if output.token_ids or output.finish_reason not in (None, FinishReason.ABORT):
                        times.tokens(len(output.token_ids), output.num_cached_tokens, output.queued_seconds)
                    if output.drafted is not None:
                        times.drafted(output.drafted)
                    if output.finish_reason is not None:
                        times.finish(output.finish_reason)
                    if part is not None:
                        part.push(output)
                    self._give(router, request_id, output)
                    if moves_kv:  # shows the fleet that its blocks are being read, or offered
                        moves_kv = False
                        self._start(self._report_once())
        except (UserError, UnavailableError):
            times.forget()
            raise
        finally:
            times.finish(FinishReason.ABORT)  # unless it has ended already
            self._metrics.end([times])
            if part is not None:
                part.end(has_failed=times.reason in (None, FinishReason.ERROR))
            logger.debug(_ended(request, times))

    def _give(self, router: _RouterConnection, request_id: str, output: Output) -> None:
        output.request_id = request_id
        waiting = router.outputs.get(request_id)
        if waiting is None:
            router.outputs[request_id] = output
        else:
            merge(waiting, output)
        self._flush_soon(router)

    def _flush_soon(self, router: _RouterConnection) -> None:
        """Flushes after one turn of the loop, when all tasks that one step has woken have added their
        outputs."""
        if not router.is_flushing:
            router.is_flushing = True
            self._loop.call_soon(self._flush, router)

    def _flush(self, router: _RouterConnection) -> None:
        router.is_flushing = False
        if router.outputs:
            if not self._send(router, Outputs(list(router.outputs.values()))):
                return
            router.outputs = {}
        for end in router.ends:
            self._send(router, end)
        router.ends = []

    def _send(self, router: _RouterConnection, message: Message) -> bool:
        """Returns False if the router is gone."""
        if self._socket.closed or router.routing_id not in self._routers:
            return False
        try:
            self._socket.send_multipart((router.routing_id, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._lose(router)
            return False
        if self._reader is not None:
            self._reader.poll()
        return True

    def _lose(self, router: _RouterConnection) -> None:
        """Cancels the requests of a router that is gone."""
        del self._routers[router.routing_id]
        for task in router.tasks.values():
            task.cancel()

    # Commands and reports

    async def _reply(self, router: _RouterConnection, call_id: int, work: Awaitable[Any]) -> None:
        try:
            reply = Reply(call_id, await work)
        except Exception as error:
            if not isinstance(error, ShoalError):
                logger.exception("a command of a router failed")
            reply = Reply(call_id, error=Failure.of(error))
        self._send(router, reply)

    async def _change_role(self, role: str) -> None:
        if self.on_role is None:
            raise UnavailableError(f"worker {self.worker_id} has not joined its fleet yet; try again")
        await self.on_role(role)

    async def _carry_out(self, command: Command[Any]) -> Any:
        if isinstance(command, ReadStats):
            return await self._engine.stats()
        if isinstance(command, FlushKv):
            raise ConfigError(f"{wire.name_of(command)} is not a command for a fleet")
        result = await self._engine.control(command)
        if isinstance(command, UpdateWeights):
            self.weights_version = result
        self._start(self._report_once())
        return result

    async def _report_on(self) -> None:
        while True:
            await self._clock.sleep(REPORT_S)
            if self._routers:
                await self._report_once()

    async def _report_once(self) -> None:
        """Sends a report to all routers. An engine that does not answer makes none; health checks find
        that."""
        with contextlib.suppress(ShoalError):
            stats, sleep = await asyncio.gather(self._engine.stats(), self._engine.sleep_state())
            self._report = Report(stats, sleep, self.weights_version, totals_of(self._metrics))
            for router in list(self._routers.values()):
                self._send(router, self._report)

    # KV events: the engine's own bytes, passed on

    def _follow_engine(self, events: EventEndpoints) -> None:
        subscriber: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.rcvhwm = MAX_WAITING_BATCHES
        subscriber.connect(events.publisher)
        self._subscriber = (subscriber, SocketReader(subscriber, self._take_batch))
        self._open_replayer(events.replay)

    def _open_replayer(self, endpoint: str) -> None:
        replayer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        replayer.connect(endpoint)
        self._replayer = (replayer, SocketReader(replayer, self._take_replayed))

    def _take_batch(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        message = KvBatch(int.from_bytes(frames[1], "big"), frames[2])
        for router in list(self._routers.values()):
            if router.follows_events:
                self._send(router, message)

    def _ask_replay(self, router: _RouterConnection, start: int) -> None:
        """Queues a replay for a router. Replays run one by one, as the engine ends a listener's replay when
        the listener asks again."""
        router.follows_events = True
        if self._replayer is None:
            self._send(router, KvReplayEnded())
            return
        self._asked.append((router, start))
        if len(self._asked) == 1:
            self._replay_next()

    def _replay_next(self) -> None:
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None
        self._asked = [asked for asked in self._asked if asked[0].routing_id in self._routers]
        if self._asked and self._replayer is not None:
            _, start = self._asked[0]
            socket, reader = self._replayer
            socket.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)
            reader.poll()
            self._replay_timer = self._loop.call_later(REPLAY_PATIENCE_S, self._abandon_replay)

    def _take_replayed(self, frames: list[bytes]) -> None:
        if not self._asked or len(frames) < 2:
            return
        router, _ = self._asked[0]
        if frames[-2] == END:
            self._end_replay()
            return
        self._send(router, KvReplayed(int.from_bytes(frames[-2], "big"), frames[-1]))
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = self._loop.call_later(REPLAY_PATIENCE_S, self._abandon_replay)

    def _abandon_replay(self) -> None:
        """Abandons a replay. The next one gets a new socket, as late batches may still arrive on this one."""
        assert self._replayer is not None
        replayer, reader = self._replayer
        endpoint = replayer.getsockopt_string(zmq.LAST_ENDPOINT)
        reader.close()
        replayer.close(linger=0)
        self._open_replayer(endpoint)
        self._end_replay()

    def _end_replay(self) -> None:
        router, _ = self._asked.pop(0)
        self._send(router, KvReplayEnded())
        self._replay_next()


class _WorkerTrace:
    """This worker's part of a request's trace."""

    def __init__(self, request: Request, model: str, tracing: Tracing) -> None:
        self._line = Timeline(request.log_id, model, "", time.perf_counter())
        self._line.prompt_tokens, self._line.params = len(request.prompt_token_ids), request.params
        self._answer = self._line.answer(request)
        self._trace = tracing.begin(self._line, request.trace_headers)

    def push(self, output: Output) -> None:
        self._line.cached_tokens = max(self._line.cached_tokens, output.num_cached_tokens)
        self._answer.push(output, time.perf_counter())

    def end(self, *, has_failed: bool) -> None:
        self._line.end(has_failed=has_failed)
        self._trace.end(self._line, "failed" if has_failed else None)


def _ended(request: Request, times: RequestTimes) -> Event:
    """Returns the log line of a router's request that has ended."""
    prompt, reason = len(request.prompt_token_ids), "refused" if times.reason is None else str(times.reason)
    text = f"of a router has ended in={prompt} out={times.count} finish={reason}"
    fields = {"prompt_tokens": prompt, "completion_tokens": times.count, "finish_reason": reason}
    return about(request.log_id, text, **fields)


def check_host(host: str, key: FleetKey | None) -> None:
    """Raises ConfigError for an address that other machines reach, without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"fleet_host must be a loopback address without a key, got {host!r}, where anybody could send "
            "requests and commands to this worker; give all processes of the fleet one key with "
            "--fleet-key-file, or leave --fleet-host out"
        )
