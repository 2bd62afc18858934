"""`SseReader`: splits a worker's bytes into server-sent events, which forwarder.py passes to stream.py. A
line may have megabytes, as vLLM's first one repeats the prompt's tokens."""

from __future__ import annotations

import codecs

from shoal.errors import WorkerFailedError

MAX_EVENT_BYTES = 1 << 28


class SseReader:
    """Returns the data of each event, for bytes in any pieces. Skips comments and other fields. Lines end
    with LF, CRLF or CR, and a byte order mark may come first."""

    def __init__(self) -> None:
        self._is_first = True  # no line was read yet
        self._after_cr = False  # the last piece ended with a CR, so a first LF belongs to the same line end
        self._line: list[bytes] = []  # pieces of an unfinished line
        self._data: list[bytes] = []  # lines of an unfinished event
        self._size = 0  # bytes of both

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of the events that end in this piece. Raises WorkerFailedError for an event
        that is too large."""
        if piece:
            if self._after_cr:
                piece = piece.removeprefix(b"\n")
            self._after_cr = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *more = piece.split(b"\n")
        self._line.append(first)
        self._size += len(first)
        if self._size > MAX_EVENT_BYTES:
            raise WorkerFailedError(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        if not more:
            return []
        events: list[bytes] = []
        self._take(b"".join(self._line), events)
        for line in more[:-1]:
            self._take(line, events)
        self._line = [more[-1]]
        # An event of many lines may be empty and yet take memory.
        self._size = len(more[-1]) + sum(map(len, self._data)) + len(self._data)
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._is_first:
            line, self._is_first = line.removeprefix(codecs.BOM_UTF8), False
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif not line and self._data:
            events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data = []
