"""The body of a request: read as the Struct of its endpoint, within bounds, with an error that names the
wrong field."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import re
import typing
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from msgspec import Struct

from shoal.server.errors import ApiError
from shoal.server.http.lenient import as_meant, with_whole_characters
from shoal.server.http.request_fields import is_silent
from shoal.server.http.wrong_value import MAX_VALUE, choices, wrong_key, wrong_value

T = TypeVar("T")


SMALL_BODY = 1 << 16  # bytes: whatever they hold, they are read in some milliseconds


MOST_VALUES = 1_000_000  # JSON values in a body


MOST_CONTAINERS = 100_000  # lists and objects among them


MISSING = "Object missing required field "


UNKNOWN = "Object contains unknown field "  # for a Struct that forbids unknown fields


NOT_A_CHOICE = "Invalid enum value "


LIMIT = re.compile("^Expected `[^`]+` (>|<|of|matching)")  # its error does not show the value


GOT_FLOAT = "got `float`"


GOT_LOOSE = re.compile("got `(null|str|int)`$")  # see lenient.py


MOST_EXACT = 1 << 53  # beyond it a float stands for several integers


def check_size(body: bytes, num_tokens: int) -> None:
    """Refuses JSON that would take long to read although its bytes are few: a parsed `[]` is forty times
    as large, and nothing else runs meanwhile. num_tokens: the model's context, which raises the limits.
    Raises ApiError."""
    if len(body) <= SMALL_BODY:
        return
    for marks, most, what in (
        (b"[{", MOST_CONTAINERS + num_tokens, "lists and objects"),
        (b",", MOST_VALUES + 2 * num_tokens, "values"),
    ):
        count = sum(map(body.count, marks))
        if count > most:
            raise ApiError(
                413,
                f"the body has {count} {what} (commas and brackets within texts included), more than "
                f"{most}, the most that is read at once; send several requests",
            )


def decode(kind: type[T], body: bytes) -> T:
    """Returns the request in `body`. Raises ApiError (400), which names the wrong field."""
    try:
        if len(body) <= SMALL_BODY:
            return msgspec.json.decode(body, type=kind)
        with _without_collections():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        if message.endswith(GOT_FLOAT) and (with_integers := _with_integers(body)) != body:
            return decode(kind, with_integers)
        if GOT_LOOSE.search(message) and (meant := as_meant(kind, body)) != body:
            return decode(kind, meant)
        field = path.replace("`", "").removeprefix("key in ").removeprefix("$.") or None
        if field and ("key` in" in path or "[...]" in path):
            field, _, rest = field.partition("[...]")
            key = wrong_key(kind, body, field)
            field += rest if key is None else f"[{key}]{rest}"
        if message.startswith(MISSING):
            name = message.removeprefix(MISSING).strip("`")
            field = f"{field}.{name}" if field else name
            message = "the field is missing"
        elif message.startswith(UNKNOWN):
            name = message.removeprefix(UNKNOWN).strip("`")
            field = f"{field}.{name}" if field else name
            message = "there is no such field"
            if field == name and issubclass(kind, Struct):
                message += f"; there are {', '.join(kind.__struct_fields__)}"
        elif field and message.startswith(NOT_A_CHOICE) and (words := choices(kind, field)):
            got = message.removeprefix(NOT_A_CHOICE)
            message = f"must be one of {', '.join(words)}, got {got:.{MAX_VALUE}}; choose one"
        elif field and LIMIT.search(message) and (value := wrong_value(body, field)) is not None:
            message += f", got {value}"
        raise ApiError(400, f"{field}: {message}" if field else message, param=field) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        if (whole := with_whole_characters(body)) != body:
            return decode(kind, whole)
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _with_integers(body: bytes) -> bytes:
    """Returns the same JSON with 2 in place of 2.0, which clients send whose language has no integers.
    Invalid JSON stays as it is."""
    try:
        return msgspec.json.encode(_INTEGERS.decode(body))
    except (ValueError, RecursionError):
        return body


def _number(text: str) -> int | float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and abs(number) <= MOST_EXACT else number


_INTEGERS = msgspec.json.Decoder(float_hook=_number)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disables Python's garbage collector, which would traverse a large body's values again and again:
    three times the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unknown_fields(kind: type, body: bytes) -> list[str]:
    """Returns the names in `body` that `kind` does not have as fields, also within its options, such as
    "stream_options.usage". `decode` has read the body before. Raises ApiError (400) for a name that is not
    valid UTF-8, which `decode` ignores."""
    given = decode(dict[str, msgspec.Raw], body)
    options = _options_by_field(kind)
    found = [name for name in given if name not in options and not is_silent(kind, name)]
    for name, option in options.items():
        if option is not None and name in given and (raw := bytes(given[name])).startswith(b"{"):
            found += [f"{name}.{field}" for field in unknown_fields(option, raw)]
    return found


@functools.cache
def _options_by_field(kind: type) -> dict[str, type | None]:
    """Returns every field, with the type of its options if it has any."""
    found: dict[str, type | None] = {}
    for name, hint in typing.get_type_hints(kind).items():
        types = [t for t in (hint, *typing.get_args(hint)) if isinstance(t, type)]
        found[name] = next((t for t in types if issubclass(t, Struct) or dataclasses.is_dataclass(t)), None)
    return found
