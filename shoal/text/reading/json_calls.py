"""Reading of JSON, and of calls that are written as JSON objects.

The reader is strict. Only bare control characters in strings are escaped, which models write for line
breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from shoal.text.reading.marks import SPACE
from shoal.text.reading.reader import Ended, Malformed, Reader, Steps

PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # unescaped characters of a string
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
WORD = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_DEPTH = 64  # arguments with deeper nesting count as malformed


def read_string(reader: Reader) -> Generator[None, None, str]:
    """Reads a JSON string and returns its value."""
    yield from reader.expect('"')
    parts: list[str] = []
    while True:
        char = yield from reader.ahead(1)
        if not char:
            raise Ended
        if char == '"':
            break
        if char == "\\":
            yield from _escape(reader, parts)
        elif char < " ":
            parts.append(json.dumps(char)[1:-1])
            reader.take(char, mended=parts[-1])
        else:
            parts.append(reader.here(PLAIN))
            reader.take(parts[-1])
    reader.take('"')
    return json.loads(f'"{"".join(parts)}"')


def _escape(reader: Reader, parts: list[str]) -> Steps:
    text = yield from reader.ahead(2)
    if text == "\\u":
        text = yield from reader.ahead(6)
    if not ESCAPE.fullmatch(text):
        raise Ended if len(text) < (6 if text[1:2] == "u" else 2) else Malformed
    parts.append(text)
    reader.take(text)


def read_word(reader: Reader) -> Steps:
    """Reads a number, true, false or null."""
    word = yield from reader.match(WORD)
    if word not in ("true", "false", "null") and not NUMBER.fullmatch(word):
        raise Malformed if len((yield from reader.ahead(len(word) + 1))) > len(word) else Ended
    reader.take(word)


def read_value(reader: Reader, depth: int = 0) -> Steps:
    char = yield from reader.next()
    if depth > MAX_DEPTH:
        raise Malformed
    if char == '"':
        yield from read_string(reader)
    elif char not in "{[":
        yield from read_word(reader)
    else:
        reader.take(char)
        end = "}" if char == "{" else "]"
        if (yield from reader.next()) == end:
            reader.take(end)
            return
        while True:
            if char == "{":
                yield from read_string(reader)
                yield from reader.expect(":")
            yield from read_value(reader, depth + 1)
            if (yield from reader.expect("," + end)) == end:
                return


def read_object(reader: Reader, name: str, call_id: str = "", end: str = "") -> Steps:
    """Reads the arguments of a call whose name is known. Without a text before `end` there are none."""
    if end and (yield from reader.is_over(end)):
        reader.begin(name, call_id)
        reader.end_arguments()
        return
    if (yield from reader.next()) != "{":
        raise Malformed
    reader.begin(name, call_id)
    reader.copies = True
    yield from read_value(reader)
    reader.copies = False
    reader.complete()


def read_call(
    reader: Reader, *, is_known: bool = False, is_strict: bool = False, name_key: str = "name"
) -> Steps:
    """Reads {"name": ..., "arguments": {...}}. is_known: it is a call only if the request has the tool.
    is_strict: without other keys. name_key: the key of the tool's name."""
    reader.next_call()
    accepts = reader.knows if is_known else reader.accepts
    name, has_arguments = "", False
    yield from reader.expect("{")
    while True:
        key = yield from read_string(reader)
        yield from reader.expect(":")
        if key == name_key and not name:
            name = yield from read_string(reader)
            if not accepts(name):
                raise Malformed
            if has_arguments:
                reader.begin(name)
                reader.complete()
        elif key in ("arguments", "parameters") and not has_arguments:
            yield from _arguments(reader, name)
            has_arguments = True
        elif not is_strict or key in ("type", "id"):
            yield from read_value(reader)
        else:
            raise Malformed
        if (yield from reader.expect(",}")) == "}":
            break
    if not name:
        raise Malformed
    if not has_arguments:
        reader.begin(name)
        reader.end_arguments()


def _arguments(reader: Reader, name: str) -> Steps:
    if (yield from reader.next()) == "{":
        if name:
            yield from read_object(reader, name)
        else:
            reader.copies = True
            yield from read_value(reader)
            reader.copies = False
        return
    # Some models write the object as text, or null for an empty one.
    start = reader.num_taken()
    yield from read_value(reader)
    try:
        value = json.loads(json.loads(reader.taken_since(start), strict=False) or "{}")
    except (TypeError, ValueError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    reader.add(json.dumps(value))
    if name:
        reader.begin(name)
        reader.complete()


def read_list(
    reader: Reader, *, is_known: bool = False, is_strict: bool = False, name_key: str = "name"
) -> Steps:
    """Reads [{"name": ...}, ...]. See read_call."""
    yield from reader.expect("[")
    while True:
        yield from read_call(reader, is_known=is_known, is_strict=is_strict, name_key=name_key)
        if (yield from reader.expect(",]")) == "]":
            return


def skip_rest(reader: Reader) -> Steps:
    """Moves past white space, and a brace too many, which is a common error."""
    yield from reader.skip(SPACE + "}")
