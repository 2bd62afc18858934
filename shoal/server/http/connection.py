"""One client's connection: uvicorn's protocol with the limits that it lacks.

They bound a request's head, its trailers and the framing of its chunks, the number of connections, the time
to receive a head, and the time that an answer stays unread. A client that leaves is noticed even while its
pipelined requests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import sys
import termios
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shoal.config import ServerConfig
from shoal.server.errors import ApiError
from shoal.server.http.exchange import LINGER_SECONDS, ON_LEAVE
from shoal.server.http.pacing import RequestPacing
from shoal.server.http.request_log import RefusalLog

# The most bytes of a head with its URL. Trailers and extensions of chunks may have as many again.
MAX_HEADER_BYTES = 64 << 10
CHUNK_BYTES = 24  # the most framing of one chunk: its size in hex digits and two line ends
SLICE_BYTES = 16 << 10  # parsed at once: it may hold hundreds of small requests, which then wait as objects
NO_HTTP = "the request is not valid HTTP"
LINGER_BYTES = 1 << 20  # from a client that keeps sending after it was refused
HANGUP_POLL_S = 0.5  # between polls of a client whose requests wait
HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class Connections:
    """The connections of one port, and which of them are idle: no request has begun, none is being
    answered."""

    def __init__(self, most: int, refusals: RefusalLog) -> None:
        """most: the number of connections. For one more, the connection that has been idle longest is closed;
        if none is idle, the new one is refused."""
        self.most, self.refusals = most, refusals
        self.num_open = 0
        self.idle: dict[Connection, None] = {}  # the longest idle one first
        self.pacing = RequestPacing()

    def make_room(self) -> bool:
        """Returns whether one more connection fits. May close an idle one for it."""
        if self.num_open <= self.most:
            return True
        longest = next((one for one in self.idle if not one.has_ahead), None)
        if longest is None:
            return False
        del self.idle[longest]
        longest.transport.abort()
        return True


class _Flow(FlowControl):
    """Stops reading while pipelined requests wait. uvicorn would resume reading whenever an application
    waits for its client, and the waiting requests would grow without bound."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.has_ahead:
            super().resume_reading()


class _HeadAndBody:
    """The transport to which uvicorn writes an answer's head and the beginning of its body. The head waits
    for the body, so that both are one system call and one packet."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # 100 Continue
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.write(self._head + data)

    def end(self) -> None:
        """Ends the answer, which may have no body (HEAD)."""
        self._cycle.transport = self._transport
        self._transport.write(self._head)

    def close(self) -> None:
        self.end()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Unchunked:
    """Sends an answer without chunks to an HTTP/1.0 client: a body without a length ends with the
    connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._has_length = True

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message["body"])
        await self._send(message)


class _Refused(Exception):
    """Raised by a callback of the parser to stop it in the middle of its input."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Connection(HttpToolsProtocol):
    """Built by uvicorn, one a client."""

    def __init__(self, *args: Any, limits: ServerConfig, all_connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._all = limits, all_connections
        # Data that is parsed later: after a request that waits for the one before it, or when it is this
        # connection's turn.
        self._kept = b""
        self._awaits_turn = False
        self._in_head = True
        self._between_messages = True
        self._is_replaying = False  # a new parser is given the head again
        self._head_bytes = 0  # the length of the message's URL, headers and trailers so far
        # The parser's callbacks report most bytes, but not chunk extensions and the like.
        self._known_bytes = 0  # bytes of the last read that callbacks have reported
        self._unknown_bytes = 0  # bytes of this message that no callback has reported
        self._began_message = False  # a message began in the last read
        self._running: Any = None  # the cycle that the application works on; self.cycle is the newest
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._hangup_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None  # set when a refusal is sent
        self._linger_bytes = LINGER_BYTES  # may still arrive then

    # Opening and closing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self._all.num_open += 1
        if not self._all.make_room():
            self._refuse(
                ApiError(
                    503,
                    f"the server has {self._all.most} connections, the most it takes "
                    "(--max-connections), and all of them are busy; try again later",
                    headers={"retry-after": "1"},
                ),
                lingers=False,
            )
            return
        self._all.idle[self] = None
        self._head_timer = self.loop.call_later(self._limits.read_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.num_open -= 1
        self._all.idle.pop(self, None)
        self._stop_timers()
        self.pipeline.clear()
        self._kept = b""
        self._abandon_running()
        super().connection_lost(exc)

    def _abandon_running(self) -> None:
        """Tells the application that its client has left. uvicorn notifies only the newest cycle."""
        running = self._running
        if running is None or running.response_complete or running.disconnected:
            return
        running.disconnected = True
        running.waiting_for_100_continue = False  # nobody takes another word
        running.message_event.set()
        if (on_leave := running.scope.get(ON_LEAVE)) is not None:
            on_leave()

    # Input

    @property
    def has_ahead(self) -> bool:
        """True if the client has sent more than the request that is being answered."""
        return bool(self.pipeline or self._kept)

    def data_received(self, data: bytes) -> None:
        """Parses the data, now or when it is this connection's turn."""
        if self._linger_timer is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self._close()
            return
        is_paused = bool(self._kept)
        self._kept += data
        if self._awaits_turn:
            return
        if self._all.pacing.take(self._take_turn):
            self._parse_kept(is_paused)
        else:
            self._awaits_turn = True
            self.flow.pause_reading()

    def _take_turn(self) -> None:
        self._awaits_turn = False
        if not self._is_closing:
            self._parse_kept(is_paused=True)

    def _parse_kept(self, is_paused: bool) -> None:
        """Feeds the kept data to the parser. Only a new message ends the keep-alive time: if the rest of an
        answered message did, a client could hold the connection for ever.

        is_paused: nothing is read because data was kept.
        """
        rest = memoryview(self._kept)
        self._kept = b""
        if is_paused:
            self.flow.resume_reading()
        while rest and not self.pipeline and not self._is_closing:
            piece, rest = rest[:SLICE_BYTES], rest[SLICE_BYTES:]
            self._receive(piece)
        if rest and not self._is_closing:
            self._kept = bytes(rest)
            self.flow.pause_reading()

    def _receive(self, data: memoryview) -> None:
        self._known_bytes, self._began_message = 0, False
        rest = data
        while rest:
            try:
                rest = self._parse(rest)
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _Refused):
                    raise
                self._refuse(error.__context__.error)
            except httptools.HttpParserError:
                self._refuse(ApiError(400, NO_HTTP))
            if self._is_closing:
                return
        if self._began_message:
            self._unknown_bytes = 0
        else:
            self._unknown_bytes = max(0, self._unknown_bytes + len(data) - self._known_bytes)
        if self._unknown_bytes > MAX_HEADER_BYTES:
            self._refuse(
                ApiError(
                    431,
                    "one field of the request's head, or the extensions of its chunks, must have at most "
                    f"{MAX_HEADER_BYTES} bytes; send less",
                )
            )

    def _parse(self, data: memoryview) -> memoryview:
        """Parses `data`. Returns what is left of it where the parser stopped."""
        try:
            self.parser.feed_data(data)
            return data[len(data) :]
        except httptools.HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
        self._decline()
        return rest

    def _decline(self) -> None:
        """Declines an upgrade that the client offers, such as HTTP/2, which Java's client offers each
        time. The parser has ended the request with its head, so a new parser is given the framing of the
        body."""
        framing = [
            b"%b: %b\r\n" % header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = True
        self._is_replaying = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        finally:
            self._is_replaying = False

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._all.idle.pop(self, None)
        self._in_head = self._began_message = True
        self._between_messages = False
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.read_timeout, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        if not self._is_replaying:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replaying:
            return
        self._count_head(len(name) + len(value) + len(": \r\n"))
        if self._in_head:  # trailers are counted and dropped
            super().on_header(name, value)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        self._known_bytes += count
        if self._head_bytes > MAX_HEADER_BYTES:
            raise _Refused(
                ApiError(
                    431,
                    f"the request's head and trailers must have at most {MAX_HEADER_BYTES} bytes; send less",
                )
            )

    def _check_target(self) -> None:
        """Refuses a target without a path of ASCII characters, such as in `CONNECT host:80`. uvicorn would
        fail."""
        try:
            path = httptools.parse_url(self.url).path
        except httptools.HttpParserInvalidURLError:
            path = None
        if path is None or not path.isascii():
            target = self.url.decode("latin-1")
            raise _Refused(
                ApiError(
                    400,
                    f"the request's target {target!r:.100} has no path of "
                    "ASCII characters; this server does not act as a proxy",
                )
            )

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        self._check_target()
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        num_waiting = len(self.pipeline)
        super().on_headers_complete()
        self.cycle.transport = _HeadAndBody(self.cycle)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]
            self.cycle.waiting_for_100_continue = False
        if len(self.pipeline) == num_waiting:
            self._running = self.cycle
        elif self._hangup_timer is None:  # uvicorn stops reading, and would not notice a hangup
            self._hangup_timer = self.loop.call_later(HANGUP_POLL_S, self._look_for_hangup)

    def on_chunk_header(self) -> None:
        self._known_bytes += CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._known_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.flow.resume_reading()  # so that a hangup is noticed
        self._between_messages = True
        self._note_idle()

    def _note_idle(self) -> None:
        if self._between_messages and not self.has_ahead and self.cycle.response_complete:
            self._all.idle[self] = None

    # The answer

    def on_response_complete(self) -> None:
        if isinstance(self._running.transport, _HeadAndBody):
            self._running.transport.end()
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # uvicorn begins this one now
        self._note_idle()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_reader()
        super().on_response_complete()
        if self._kept and not self.pipeline:
            self.loop.call_soon(self.data_received, b"")  # not now: the completed cycle is still on the stack
        else:
            self.flow.resume_reading()

    def _look_for_hangup(self) -> None:
        """Polls whether the client has left. Unread data hides the end of the stream, so it polls the
        state of the socket."""
        self._hangup_timer = None
        if self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self._socket_fd(), HANGUP)
        if any(events & HANGUP for _, events in poll.poll(0)):
            self.transport.abort()
        elif self.pipeline:
            self._hangup_timer = self.loop.call_later(HANGUP_POLL_S, self._look_for_hangup)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """Closes once all written data is sent, but waits only a limited time for a client that does not
        read."""
        self.transport.close()
        self._await_reader()

    def _await_reader(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = self.loop.call_later(
            self._limits.write_timeout, self._check_reader, self._num_unread()
        )

    def _check_reader(self, before: int) -> None:
        """Drops a client that has read nothing since the last check. A slow client continues, as a large
        answer takes time."""
        if self._num_unread() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _num_unread(self) -> int:
        """Returns the number of bytes that the client's side has not acknowledged: in this process's
        buffer or in the kernel's, which may hold megabytes."""
        in_kernel = fcntl.ioctl(self._socket_fd(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _socket_fd(self) -> int:
        return self.transport.get_extra_info("socket").fileno()

    # Refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _head_is_late(self) -> None:
        seconds = self._limits.read_timeout
        self._refuse(ApiError(408, f"the request's head did not arrive within {seconds:g} s"))

    def _refuse(self, error: ApiError, lingers: bool = True) -> None:
        """Answers input that never became a request, and closes. While an earlier request waits for its
        answer, it only closes the connection."""
        if self._is_closing:
            return
        self._stop_timers()
        self._all.refusals.log(self.client[0] if self.client else "-", error)
        running = self._running
        is_running = running is self.cycle and not self._in_head
        if running is None or running.response_complete or (is_running and not running.response_started):
            body = error.body()
            more = b"".join(
                b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in error.headers.items()
            )
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"%bconnection: close\r\n\r\n%b"
                % (error.status, REASONS[error.status], len(body), more, body)
            )
            if lingers:
                self._linger()
                return
        self._close()

    def _linger(self) -> None:
        """Closes when the client has closed, or after LINGER_SECONDS or LINGER_BYTES more, which are dropped.
        A socket that is closed with unread data is reset, and then the client may never see the answer."""
        self._abandon_running()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self._close)
        self._kept = b""
        self.pipeline.clear()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has reset the connection just now
                self.transport.write_eof()
        self.flow.resume_reading()

    @property
    def _is_closing(self) -> bool:
        return self._linger_timer is not None or self.transport.is_closing()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._hangup_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
