"""One client's connection: uvicorn's protocol with the limits that it lacks.

They bound a request's head, its trailers and the framing of its chunks, the number of connections, the time
that a head may take, and the time that an answer may lie unread. Requests that come ahead of their turn
(pipelined ones) do not hide that their client has left.
"""

from __future__ import annotations

import asyncio
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
from shoal.server.http.exchange import ON_LEAVE
from shoal.server.http.pacing import RequestPacing
from shoal.server.http.request_log import RefusalLog

# The most bytes of a head with its URL. Trailers and extensions of chunks may have as many again.
MAX_HEADER_BYTES = 64 << 10
CHUNK_BYTES = 24  # the most framing of one chunk: its size in hex digits and two line ends
SLICE_BYTES = 16 << 10  # parsed at once: it may hold hundreds of small requests, which then wait as objects
NO_HTTP = "what came is no HTTP"
HANGUP_POLL_S = 0.5  # between looks at a client whose requests wait for their turn
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
        """Whether one more connection may stay. An idle one may have been closed for it."""
        if self.num_open <= self.most:
            return True
        longest = next((one for one in self.idle if not one.has_ahead), None)
        if longest is None:
            return False
        del self.idle[longest]
        longest.transport.abort()
        return True


class _Flow(FlowControl):
    """Reads no more while requests wait for their turn. uvicorn would resume reading whenever an application
    waits for its client, and those requests would grow without end."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.has_ahead:
            super().resume_reading()


class _HeadAndBody:
    """To whom uvicorn writes an answer up to the beginning of its body. The head waits for that, so that both
    are one call of the system and one packet."""

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
        """The answer is whole. That of a HEAD has no body."""
        self._cycle.transport = self._transport
        self._transport.write(self._head)

    def close(self) -> None:
        self.end()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Unchunked:
    """Sends the answer to an HTTP/1.0 client, which does not know chunks: a body without a length ends with
    the connection."""

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
    """A callback of the parser raises this to stop it in the middle of what it was given."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Connection(HttpToolsProtocol):
    """Built by uvicorn, one a client."""

    def __init__(self, *args: Any, limits: ServerConfig, all_connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._all = limits, all_connections
        # Data that is parsed later: behind a request that waits for the one before it, or when it is this
        # connection's turn.
        self._kept = b""
        self._awaits_turn = False
        self._in_head = True
        self._between_messages = True
        self._is_told_again = False  # the parser reads a head that it has read before
        self._head_bytes = 0  # the length of the message's URL, headers and trailers so far
        # The parser's callbacks tell of most bytes, not of chunk extensions and the like.
        self._known_bytes = 0  # bytes of the last read that a callback told of
        self._unknown_bytes = 0  # bytes of this message that no callback has told of
        self._began_message = False  # a message began in the last read
        self._running: Any = None  # the cycle that the application works on; self.cycle is the newest
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._hangup_timer: asyncio.TimerHandle | None = None

    # Its beginning and its end

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
                )
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
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn tells the newest cycle alone
            running.disconnected = True
            running.message_event.set()
            if (on_leave := running.scope.get(ON_LEAVE)) is not None:
                on_leave()
        super().connection_lost(exc)

    # What the client sends

    @property
    def has_ahead(self) -> bool:
        """Whether the client sent more than the request that is being answered."""
        return bool(self.pipeline or self._kept)

    def data_received(self, data: bytes) -> None:
        """Parses the data, now or when it is this connection's turn."""
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
        if not self.transport.is_closing():
            self._parse_kept(is_paused=True)

    def _parse_kept(self, is_paused: bool) -> None:
        """Hands the parser the data whose turn it is. Only a new message ends the keep-alive time. The rest
        of a message that is answered already does not, or a client could hold the connection without end.

        is_paused: nothing is read because data was kept.
        """
        rest = memoryview(self._kept)
        self._kept = b""
        if is_paused:
            self.flow.resume_reading()
        while rest and not self.pipeline and not self.transport.is_closing():
            piece, rest = rest[:SLICE_BYTES], rest[SLICE_BYTES:]
            self._take_in(piece)
        if rest and not self.transport.is_closing():
            self._kept = bytes(rest)
            self.flow.pause_reading()

    def _take_in(self, data: memoryview) -> None:
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
            if self.transport.is_closing():
                return
        if self._began_message:
            self._unknown_bytes = 0
        else:
            self._unknown_bytes = max(0, self._unknown_bytes + len(data) - self._known_bytes)
        if self._unknown_bytes > MAX_HEADER_BYTES:
            self._refuse(
                ApiError(
                    431,
                    "one field of the request's head, or what its chunks say beside their "
                    f"content, has more than {MAX_HEADER_BYTES} bytes",
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
        """Declines another protocol that the client offers, such as HTTP/2, which Java's client offers each
        time. The parser has ended the request with its head, so a new parser is told of the body."""
        framing = [
            b"%b: %b\r\n" % header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = True
        self._is_told_again = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        finally:
            self._is_told_again = False

    # What the parser makes of it

    def on_message_begin(self) -> None:
        if self._is_told_again:
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
        if not self._is_told_again:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_told_again:
            return
        self._count_head(len(name) + len(value) + len(": \r\n"))
        if self._in_head:  # trailers are counted and dropped
            super().on_header(name, value)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        self._known_bytes += count
        if self._head_bytes > MAX_HEADER_BYTES:
            raise _Refused(
                ApiError(431, f"the request's head and trailers have more than {MAX_HEADER_BYTES} bytes")
            )

    def _check_target(self) -> None:
        """Refuses a target without a path of ASCII characters, such as that of `CONNECT host:80`. uvicorn
        would fail."""
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
                    "ASCII characters; this server is no proxy",
                )
            )

    def on_headers_complete(self) -> None:
        if self._is_told_again:
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
        elif self._hangup_timer is None:  # uvicorn reads no more, so it would not see that the client leaves
            self._hangup_timer = self.loop.call_later(HANGUP_POLL_S, self._look_for_hangup)

    def on_chunk_header(self) -> None:
        self._known_bytes += CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._known_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.flow.resume_reading()  # so that it is seen when the client leaves
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
            self._running = self.pipeline[-1][0]  # the one that uvicorn begins now
        self._note_idle()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_reader()
        super().on_response_complete()
        if self._kept and not self.pipeline:
            self.loop.call_soon(self.data_received, b"")  # not now: whose answer is complete calls us
        else:
            self.flow.resume_reading()

    def _look_for_hangup(self) -> None:
        """Looks whether the client has left. The state of its socket tells, as data that it sent before lies
        unread."""
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
        """Closes once all that was written is sent, and does not wait without end for a client that does not
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
        """Gives up a client that took nothing since the last look. A slow one goes on, as a big answer takes
        its time."""
        if self._num_unread() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _num_unread(self) -> int:
        """The number of bytes that the client's side has not acknowledged. They are in our buffer or in the
        kernel's, which may hold megabytes."""
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

    def _refuse(self, error: ApiError) -> None:
        """Answers what never became a request, and closes. While an earlier request waits for its answer it
        only closes the connection."""
        self._stop_timers()
        if self.transport.is_closing():
            return
        self._all.refusals.tell(self.client[0] if self.client else "-", error)
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
        self._close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._hangup_timer):
            if timer is not None:
                timer.cancel()
