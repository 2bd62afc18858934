"""The key of a map that makes a body invalid: msgspec's errors name only the map."""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_KEY = 100  # characters of a key that are shown
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


def _at(value: Any, path: str) -> Any:
    """Returns what lies at `path`. None if there is nothing."""
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
