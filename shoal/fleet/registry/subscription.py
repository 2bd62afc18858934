"""`Subscription`: the messages of one subject, in a bounded buffer, decoded as they are read by `async for`.
`Reader` decodes payloads, and counts and skips malformed ones; registry.py fills a subscription."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode


class Reader:
    """Decodes payloads of other processes. Unreadable ones are counted by kind, and logged once per kind."""

    def __init__(self) -> None:
        self.num_unreadable: Counter[str] = Counter()
        self._decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}

    def read(self, kind: str, payload: bytes, type_: type[T]) -> T | None:
        """Returns None for a payload that is not a message of this type. `kind`: its name in counts and
        log."""
        decoder = self._decoders.get(type_)
        if decoder is None:
            decoder = self._decoders[type_] = msgspec.msgpack.Decoder(type_)
        try:
            return decoder.decode(payload)  # type: ignore[return-value]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.num_unreadable[kind] += 1
            if self.num_unreadable[kind] == 1:
                logger.warning(
                    "unreadable message of %s skipped; further ones are skipped without a warning: %s "
                    "(%d bytes, %r)",
                    kind,
                    error,
                    len(payload),
                    payload[:40],
                )
            return None


class Subscription(Generic[T]):
    """The messages of a subject, in the order in which each publisher sent them, read by `async for`.

    A reader that is slower than its publishers loses the oldest messages beyond `max_buffered`. `num_lost`
    counts them, the first is logged, and other readers are not slowed down.
    """

    def __init__(self, subject: str, type_: type[T], reader: Reader, max_buffered: int) -> None:
        self.num_lost = 0
        self._kind, self._type, self._reader = f"subject {subject}", type_, reader
        self._buffer: deque[bytes] = deque(maxlen=max_buffered)
        self._arrived = asyncio.Event()
        self._is_closed = False
        self.stop_listening: Callable[[], None] = lambda: None

    def put(self, payload: bytes) -> None:
        if len(self._buffer) == self._buffer.maxlen:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning(
                    "%s is read more slowly than it is published; the oldest messages beyond %d are lost "
                    "without a further warning",
                    self._kind,
                    self._buffer.maxlen,
                )
        self._buffer.append(payload)
        self._arrived.set()

    def close(self) -> None:
        """Ends the reader's loop after the buffered messages."""
        if not self._is_closed:
            self._is_closed = True
            self._arrived.set()
            self.stop_listening()

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            while self._buffer:
                message = self._reader.read(self._kind, self._buffer.popleft(), self._type)
                if message is not None:
                    return message
            if self._is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
