"""Repair of loosely written bodies: a null where a field may be absent, a number or a flag as text, as
pydantic takes them, and half a character. Only fields with the type of a number or a flag are changed, so
prompts, schemas, arguments of calls and variables of templates stay as they are."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from typing import Any

import msgspec
from msgspec import inspect

from shoal.text.conversation import with_whole_escapes

ZEROS = re.compile(r"\.0+$")  # "2.0" is 2, as in pydantic
FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def with_whole_characters(body: bytes) -> bytes:
    """Returns JSON with U+FFFD in place of each lone surrogate. JavaScript clients that cut a text by its
    length send them."""
    return with_whole_escapes(body.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def as_meant(kind: Any, body: bytes) -> bytes:
    """Returns the repaired JSON of a request of this type; `body` itself if there is nothing to repair, or
    if it is malformed after the wrong value."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    meant = _meant(type_of(kind), value)
    return body if meant is value else msgspec.json.encode(meant)


@functools.cache
def type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _meant(kind: inspect.Type, value: Any) -> Any:
    """Returns the repaired value; the same object if nothing changes."""
    kinds = kinds_of(kind)
    if isinstance(value, dict):
        for one in kinds:
            if isinstance(one, inspect.StructType | inspect.DataclassType):
                return _with_fields(one, value)
            if isinstance(one, inspect.DictType) and all(map(_is_number, kinds_of(one.value_type))):
                meant = {key: _meant(one.value_type, item) for key, item in value.items()}
                return value if all(meant[key] is value[key] for key in value) else meant
    elif isinstance(value, list):
        for one in kinds:
            if isinstance(one, inspect.ListType) and (
                isinstance(one.item_type, inspect.StructType) or _is_ids(one)
            ):
                items = [_meant(one.item_type, item) for item in value]
                return value if all(a is b for a, b in zip(items, value)) else items
    elif isinstance(value, str | int | float) and len(kinds) == 1 + any(map(_is_none, kinds)):
        [one] = [one for one in kinds if not _is_none(one)]
        if isinstance(one, inspect.BoolType) and not isinstance(value, bool):
            return FLAGS.get(str(value).lower(), value)
        if _is_number(one) and isinstance(value, str):
            number = as_integer(value) if isinstance(one, inspect.IntType) else as_number(value)
            return value if number is None else number
    return value


def as_integer(text: str) -> int | None:
    """Returns the integer that a text spells. None: it is not one."""
    with contextlib.suppress(ValueError):
        if text.isascii():
            return int(ZEROS.sub("", text.strip()))
    return None


def as_number(text: str) -> float | None:
    """Returns the finite number that a text spells. None: it is not one."""
    with contextlib.suppress(ValueError):
        if text.isascii() and math.isfinite(number := float(text)):
            return number
    return None


def _with_fields(kind: inspect.StructType | inspect.DataclassType, value: dict[str, Any]) -> dict[str, Any]:
    meant = dict(value)
    for field in kind.fields:
        name = field.encode_name
        if name not in value:
            continue
        if value[name] is None and not field.required and not _takes_none(field.type):
            del meant[name]
        elif not (field.required and _is_ids(field.type)):  # which are a prompt
            meant[name] = _meant(field.type, value[name])
    same = len(meant) == len(value) and all(meant[name] is value[name] for name in value)
    return value if same else meant


def kinds_of(kind: inspect.Type) -> list[inspect.Type]:
    """Returns the types that a union stands for, without descriptions."""
    if isinstance(kind, inspect.Metadata):
        return kinds_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [one for part in kind.types for one in kinds_of(part)]
    return [kind]


def _is_number(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.IntType | inspect.FloatType)


def _is_ids(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.ListType) and all(map(_is_number, kinds_of(kind.item_type)))


def _is_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType)


def _takes_none(kind: inspect.Type) -> bool:
    return any(isinstance(one, inspect.NoneType | inspect.AnyType) for one in kinds_of(kind))
