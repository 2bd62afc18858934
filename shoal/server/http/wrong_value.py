"""Details for the error of a wrong value, which msgspec leaves out: the key in a map, the value, choices."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

from shoal.server.http.lenient import kinds_of, type_of

MAX_KEY = 100  # characters of a key that are shown
MAX_VALUE = 40  # the same of a value
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def wrong_key(kind: Any, body: bytes, path: str) -> str | None:
    """Returns the key of the map at `path`, such as `logit_bias` or `sampling_params.logit_bias`, that
    `kind` refuses in `body`. None if it is unknown.

    It searches by halves, as each step converts the whole body."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    holder = _at(value, path)
    if not isinstance(holder, dict):
        return None
    entries = list(holder.items())
    while len(entries) > 1:
        middle = len(entries) // 2
        _fill(holder, entries[:middle])
        entries = entries[:middle] if _is_refused(kind, value) else entries[middle:]
    _fill(holder, entries)
    return entries[0][0][:MAX_KEY] if entries and _is_refused(kind, value) else None


def wrong_value(body: bytes, path: str) -> str | None:
    """Returns the value at `path`, as an error shows it. None if the whole body is not JSON."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return f"{_at(value, path)!r:.{MAX_VALUE}}"


def choices(kind: Any, path: str) -> list[str]:
    """Returns the words that `kind` takes at `path`. Empty if it takes any."""
    kinds = [type_of(kind)]
    for name, _ in STEP.findall(path):
        kinds = [inner for one in kinds for inner in _within(one, name)]
    return [str(word) for one in kinds if isinstance(one, inspect.LiteralType) for word in one.values]


def _within(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """Returns the types of a field, or of the items of a list or a map."""
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        return [one for field in kind.fields if field.encode_name == name for one in kinds_of(field.type)]
    if isinstance(kind, inspect.ListType):
        return kinds_of(kind.item_type)
    return kinds_of(kind.value_type) if isinstance(kind, inspect.DictType) else []


def _at(value: Any, path: str) -> Any:
    """Returns the value at `path`. None if there is nothing."""
    for name, index in STEP.findall(path):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _fill(holder: dict[str, Any], entries: list[tuple[str, Any]]) -> None:
    holder.clear()
    holder.update(entries)


def _is_refused(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return True
    return False
