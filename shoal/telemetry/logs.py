"""The format of the log: lines of text for people, or one JSON object per line for programs.

The server and its engine's process use the same format, because they write to the same place.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Protocol

PLAIN = re.compile(r"[\w.:/+=@%-]+", re.ASCII)  # text without need for quotes
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # not tab and line feed


class Event:
    """A message with fields. The text format shows the text; the JSON format also has the fields."""

    def __init__(self, text: str, fields: Mapping[str, Any]) -> None:
        self.text, self.fields = text, fields

    def __str__(self) -> str:
        return self.text


def about(request_id: str, text: str, **fields: Any) -> Event:
    """Returns a message about one request. It has the id under which the answering server logs the request,
    so that one search finds all messages."""
    return Event(f"request {text} id={quoted(request_id)}", {"request_id": request_id, **fields})


def quoted(text: str) -> str:
    """Returns the text, in quotes if it could be read as more than one field."""
    if PLAIN.fullmatch(text.replace(",", "")):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


class TextFormatter(logging.Formatter):
    """Formats records as text. Each record begins with its time. Further lines of a message are indented, so
    that text from a client cannot look like a separate record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._second, self._shown = -1, ""  # the time of the last record, and its text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, super().formatTime(record, datefmt)
        return self._shown

    def format(self, record: logging.LogRecord) -> str:
        return _escaped(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects, one per line. Keys are time (UTC), level, logger and message, the keys
    of an Event, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, Event):
            line |= record.msg.fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Stream(Protocol):
    """A destination for lines of the log."""

    def write(self, text: str, /) -> Any: ...

    def flush(self) -> None: ...


def set_up(level: int, style: str, stream: Stream | None = None) -> None:
    """Sends messages of `level` and above to a stream (default: standard error), in `text` or `json`."""
    # The format has no threads, processes or lines of code, and finding them takes a third of a record's
    # time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[assignment]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def current_style() -> str:
    """Returns the style of this process's log, for a child that writes to the same place."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return "json" if any(isinstance(formatter, JsonFormatter) for formatter in formatters) else "text"


def _escaped(text: str) -> str:
    """Returns the text with control characters escaped, because they could control a terminal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
