"""Answers readers of offered KV blocks (kv/transfer/offers.py): a thread with a TCP port. Without torch.

Input is bounded: the number of connections, a frame's size, and the time that a connection may be
silent before it shows a ticket. A connection that sends anything but messages of its protocol is closed.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time

import msgspec

from shoal.errors import ConfigError
from shoal.kv.transfer.lease import (
    MAX_FRAME_BYTES,
    Current,
    FromReader,
    Intact,
    Message,
    Open,
    Opened,
    Refused,
    Release,
    Renew,
    Verify,
    Watch,
    frame,
)
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.ticket import NO_MESSAGE, TransferError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
SILENT_S = 10.0  # timeout of a connection that has shown no ticket
_decoder = msgspec.msgpack.Decoder(FromReader)


class _ReaderConnection:
    """One reader. While it waits for progress, `watch` is its request and `until` the time of the answer at
    the latest."""

    def __init__(self, opened: socket.socket, until: float) -> None:
        self.socket, self.until = opened, until
        self.received = bytearray()
        self.ticket_id: bytes | None = None
        self.watch: Watch | None = None


class OfferServer:
    """Serves from the start until `close`. `host` is the address to listen at, and the one that tickets name:
    loopback, unless readers come from other hosts. Raises ConfigError if it can't listen there."""

    def __init__(self, offers: Offers, host: str = "127.0.0.1", port: int = 0) -> None:
        self._offers = offers
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"readers of KV blocks can't be served at {host}:{port}: {error}; choose another address"
            ) from None
        self._listener.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._connections: set[_ReaderConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        offers.server = self.address
        offers.call_on_change(self._wake)
        self._thread = threading.Thread(target=self._run, name="kv-offers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections; their offers end. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._offers.call_on_change(lambda: None)
        os.close(self._wake_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._closing:
            self._step()
        for connection in list(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def _step(self) -> None:
        deadlines = [connection.until for connection in self._connections if self._waits(connection)]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                self._read(key.data)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.watch is not None:
                self._answer_watch(connection, now)
            elif connection.ticket_id is None and connection.until <= now:
                self._drop(connection)

    def _waits(self, connection: _ReaderConnection) -> bool:
        return connection.watch is not None or connection.ticket_id is None

    def _accept(self) -> None:
        try:
            opened, _ = self._listener.accept()
        except OSError:  # the client has left, or no descriptor is free, which may last
            time.sleep(0.01)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            logger.warning("a reader of KV blocks was refused: %d are connected", MAX_CONNECTIONS)
            opened.close()
            return
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _ReaderConnection(opened, time.monotonic() + SILENT_S)
        self._connections.add(connection)
        self._selector.register(opened, selectors.EVENT_READ, connection)

    def _read(self, connection: _ReaderConnection) -> None:
        """Reads from the socket, and answers each complete message."""
        try:
            some = connection.socket.recv(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        received = connection.received
        received += some
        keep = bool(some)
        while keep and len(received) >= 4:
            length = int.from_bytes(received[:4], "little")
            if length > MAX_FRAME_BYTES:
                keep = False
            elif len(received) < 4 + length:
                break
            else:
                body = bytes(received[4 : 4 + length])
                del received[: 4 + length]
                keep = self._take(connection, body)
        if not keep:
            self._drop(connection)

    def _take(self, connection: _ReaderConnection, body: bytes) -> bool:
        """Answers a message. Returns False if the connection must be closed."""
        try:
            message = _decoder.decode(body)
            answer = self._answer(connection, message)
        except TransferError as error:
            self._send(connection, Refused(error.failure, str(error)))
            return False
        except (*NO_MESSAGE, _OutOfTurnError):
            return False
        return answer is None or self._send(connection, answer)

    def _answer(self, connection: _ReaderConnection, message: FromReader) -> Message | None:
        """Returns the answer, or None if it comes later or never. Raises TransferError, which is then the
        answer."""
        offers, ticket_id = self._offers, connection.ticket_id
        if isinstance(message, Open):
            if ticket_id is not None:
                raise _OutOfTurnError
            progress = offers.open(message.id, message.digest, connection)
            connection.ticket_id = message.id
            return Opened(progress)
        if ticket_id is None or (connection.watch is not None and isinstance(message, Watch | Verify)):
            raise _OutOfTurnError
        match message:
            case Watch():
                offers.renew(ticket_id)
                connection.watch, connection.until = message, time.monotonic() + message.timeout_s
            case Renew():
                offers.renew(ticket_id)
            case Verify():
                offers.verify(ticket_id)
                return Intact()
            case Release():
                offers.release(ticket_id)
        return None

    def _answer_watch(self, connection: _ReaderConnection, now: float) -> None:
        assert connection.watch is not None and connection.ticket_id is not None
        try:
            progress = self._offers.progress(connection.ticket_id)
        except TransferError as error:
            self._send(connection, Refused(error.failure, str(error)))
            self._drop(connection)
            return
        if progress != connection.watch.seen or connection.until <= now:
            connection.watch = None
            if not self._send(connection, Current(progress)):
                self._drop(connection)

    def _send(self, connection: _ReaderConnection, message: Message) -> bool:
        """Sends a message, and says if it was sent. A reader has one question open at a time, so its socket
        always has room."""
        try:
            data = frame(message)
            return connection.socket.send(data) == len(data)
        except OSError:
            return False

    def _drop(self, connection: _ReaderConnection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.ticket_id is not None:
            self._offers.leave(connection.ticket_id, connection)


class _OutOfTurnError(Exception):
    """A message that the protocol does not allow now."""
