"""`ProcessLog`: one log for many processes; each line is written whole, after its process's name.
processes.py pipes the output of workers into it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import TextIO

MOST_BYTES = 1 << 16  # limit of a line; a longer one is split
LAST_WORDS_S = 2.0


class ProcessLog:
    """`style`: "text", or "json" for one object per line with the key `process`."""

    def __init__(self, stream: TextIO, style: str, width: int = 0) -> None:
        self._stream, self._style, self._width = stream, style, width
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def pipe(self, name: str) -> Iterator[int]:
        """Yields a file descriptor for a process's output, which is closed when the block is left."""
        reader, writer = os.pipe()
        # A thread, as a blocked terminal must not block the event loop.
        thread = threading.Thread(target=self._copy, args=(name, reader), name=f"log of {name}", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()
        try:
            yield writer
        finally:
            os.close(writer)

    def stream_of(self, name: str) -> _Lines:
        """Returns a stream for this process's own log handler."""
        return _Lines(self, name)

    def write(self, name: str, text: str) -> None:
        if self._style == "json":
            line = self._object(name, text)
        else:
            line = f"{name:<{self._width}} | {text}"
        # A single call, so that no other thread writes in between.
        with contextlib.suppress(ValueError, OSError):  # the reader has closed the stream
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Waits a moment for the last output of ended processes."""
        for thread in self._threads:
            thread.join(LAST_WORDS_S)

    def _copy(self, name: str, reader: int) -> None:
        with open(reader, "rb") as lines:
            while line := lines.readline(MOST_BYTES):
                self.write(name, line.decode("utf-8", "replace").rstrip())

    def _object(self, name: str, text: str) -> str:
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        return json.dumps({"process": name, **(said if isinstance(said, dict) else {"message": text})})


class _Lines:
    """A stream that writes to the log, line by line."""

    def __init__(self, log: ProcessLog, name: str) -> None:
        self._log, self._name = log, name

    def write(self, text: str) -> None:
        for line in text.splitlines():
            self._log.write(self._name, line)

    def flush(self) -> None:
        """Does nothing: the log is unbuffered."""
