"""Reading of arguments that are written as text between tags, whose types the tool's schema has."""

from __future__ import annotations

import json

from shoal.text.reading.marks import marks_of
from shoal.text.reading.reader import Reader, Steps
from shoal.text.reading.typed_values import NAMES, is_text, json_of, kinds_of

MAX_START = 32  # characters of a value that are enough to recognize a string
TEXT = frozenset({"string"})
NOT_TEXT = NAMES - TEXT


def read_text(reader: Reader, end: str) -> Steps:
    """Reads the text up to `end` as a JSON string, while it is written."""
    marks = marks_of(end)
    reader.add('"')
    while True:
        rest = yield from reader.available()
        found = marks.find(rest)
        begun = None if found or reader.is_ended else marks.begun(rest, max(0, len(rest) - marks.longest))
        piece = rest[: found.start()] if found else rest[: begun.start()] if begun else rest
        reader.take(piece)
        reader.add(json.dumps(piece, ensure_ascii=False)[1:-1])
        if found:
            reader.take(end)
            reader.add('"')
            return
        yield from reader.more()


def read_argument(
    reader: Reader, tool: str, key: str, end: str, *, is_string: bool | None = None, trims_line: bool = False
) -> Steps:
    """Reads the value of an argument and the tag after it, `end`, which alone closes it. The value streams
    once it must be a string; until then its type is open.

    is_string: what the model says of the type. trims_line: one line break on each side of the value is not
    part of it.
    """
    reader.add_key(json.dumps(key, ensure_ascii=False))
    kinds = TEXT if is_string else kinds_of(reader.expected.schemas.get(tool, {}), key)
    if is_string is False:
        kinds = kinds or NOT_TEXT
    if trims_line:
        yield from reader.one_line_break()
    marks = marks_of(end, "\n" + end, "\r\n" + end) if trims_line else marks_of(end)
    value: list[str] = []
    start, streams = "", False
    while True:
        rest = yield from reader.available()
        if found := marks.find(rest):
            piece = rest[: found.start()]
        else:
            begun = None if reader.is_ended else marks.begun(rest, max(0, len(rest) - marks.longest))
            piece = rest[: begun.start()] if begun else rest
        reader.take(piece)
        value.append(piece)
        start += piece[: MAX_START - len(start)]
        if not streams and is_text(start, kinds):
            streams = True
            reader.add('"')
        if streams and (text := "".join(value)):
            reader.add(json.dumps(text, ensure_ascii=False)[1:-1])
            value.clear()
        if found:
            reader.take(found[0])
            reader.add('"' if streams else json_of("".join(value), kinds))
            return
        yield from reader.more()
