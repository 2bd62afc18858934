"""A reader's lease on blocks offered by another worker, over one TCP connection to the owner's OfferServer
(kv/transfer/offer_server.py), and the messages of that connection. Without torch.

A frame is a length (4 bytes, little-endian) and msgpack. The connection keeps the lease: when it ends, the
owner knows at once that this reader is gone. A host that fails without closing it is noticed when the lease
expires.
"""

from __future__ import annotations

import socket
import threading
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shoal.kv.transfer.ticket import (
    DIGEST_BYTES,
    ID_BYTES,
    NO_MESSAGE,
    Failure,
    Progress,
    TransferError,
    digest_of,
    unseal,
)

MAX_FRAME_BYTES = 4096
ANSWER_S = 10.0  # timeout of the owner's answers
MAX_WATCH_S = 60.0


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages."""


# From the reader


class Open(Message, frozen=True):
    """The first message. Answered by Opened."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Watch(Message, frozen=True):
    """Answered by Current once the progress differs from `seen`, or after `timeout_s`."""

    seen: Progress
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_WATCH_S)]


class Renew(Message, frozen=True):
    """Has no answer."""


class Verify(Message, frozen=True):
    """Answered by Intact."""


class Release(Message, frozen=True):
    """The reader is done with the blocks. Not answered."""


# From the owner


class Opened(Message, frozen=True):
    progress: Progress


class Current(Message, frozen=True):
    progress: Progress


class Intact(Message, frozen=True):
    """All blocks read before the Verify message had the ticket's content."""


class Refused(Message, frozen=True):
    """Replaces any answer, and is the last message."""

    failure: Failure
    message: Annotated[str, Meta(max_length=1000)]


Answer = TypeVar("Answer", bound=Message)
FromReader = Open | Watch | Renew | Verify | Release
FromOwner = Opened | Current | Intact | Refused
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromOwner)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


class Lease:
    """A ticket's blocks, held at their owner until `release`, `close` or the end of this process.

    One thread watches and verifies; any thread may `renew` meanwhile. Every request renews the lease, so
    `renew` is only needed in a long time without requests.
    """

    def __init__(self, sealed: bytes, timeout_s: float = ANSWER_S) -> None:
        """Opens the ticket at its owner, which must know it and still hold its blocks. Raises
        TransferError."""
        self.ticket = unseal(sealed)
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._socket = _connect(self.ticket.server, timeout_s)
        self._received = bytearray()
        try:
            opened = self._ask(Open(self.ticket.id, digest_of(sealed)), Opened, timeout_s)
        except BaseException:
            self.close()
            raise
        self.progress: Progress = opened.progress

    def watch(self, timeout_s: float) -> Progress:
        """Returns the progress. Waits until it has changed since the last call, up to `timeout_s`. Raises
        TransferError if the offer or its owner has ended."""
        wait_s = min(timeout_s, MAX_WATCH_S)
        self.progress = self._ask(Watch(self.progress, wait_s), Current, wait_s + self._timeout_s).progress
        return self.progress

    def renew(self) -> None:
        """Renews the lease without waiting for an answer. Raises TransferError if the owner is gone."""
        self._send(Renew())

    def verify(self) -> None:
        """Raises TransferError unless all blocks read so far had the ticket's content."""
        self._ask(Verify(), Intact, self._timeout_s)

    def release(self) -> None:
        """Notifies the owner that the blocks are no longer needed, and closes. Does not raise if the owner is
        gone."""
        try:
            self._send(Release())
        except TransferError:
            pass
        self.close()

    def close(self) -> None:
        """Ends the lease. Safe to call twice."""
        self._socket.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(frame(message))
        except OSError as error:
            raise self._lost(error) from None

    def _ask(self, message: Message, kind: type[Answer], timeout_s: float) -> Answer:
        self._send(message)
        self._socket.settimeout(timeout_s)
        try:
            answer = self._receive()
        except TimeoutError:
            raise TransferError(
                Failure.LATE, f"{self.ticket.server} has not answered for {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise self._lost(error) from None
        if isinstance(answer, Refused):
            raise TransferError(answer.failure, answer.message)
        if not isinstance(answer, kind):
            raise self._nonsense(f"{type(answer).__name__} in place of {kind.__name__}")
        return answer

    def _receive(self) -> FromOwner:
        """Returns the next message. Raises OSError and TransferError."""
        received = self._received
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            if len(received) >= 4 and int.from_bytes(received[:4], "little") > MAX_FRAME_BYTES:
                raise self._nonsense(f"a frame of {int.from_bytes(received[:4], 'little')} bytes")
            some = self._socket.recv(MAX_FRAME_BYTES)
            if not some:
                raise ConnectionError("it closed the connection")
            received += some
        end = 4 + int.from_bytes(received[:4], "little")
        body = bytes(received[4:end])
        del received[:end]
        try:
            return _decoder.decode(body)
        except NO_MESSAGE as error:
            raise self._nonsense(str(error)) from None

    def _lost(self, error: OSError) -> TransferError:
        return TransferError(Failure.LOST, f"the blocks' owner {self.ticket.server} is gone: {error}")

    def _nonsense(self, what: str) -> TransferError:
        return TransferError(Failure.NONSENSE, f"{self.ticket.server} answered with {what}")


def _connect(server: str, timeout_s: float) -> socket.socket:
    host, _, port = server.rpartition(":")
    try:
        if not 0 < int(port) < 1 << 16:  # address resolution would take a larger one modulo 2^16
            raise ValueError(f"the port must be from 1 to 65535, got {port}")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError:
        raise TransferError(Failure.LATE, f"{server} has not answered for {timeout_s:g} s") from None
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(
            Failure.UNREACHABLE, f"the blocks' owner {server!r} can't be reached: {error}"
        ) from None
    return connection
