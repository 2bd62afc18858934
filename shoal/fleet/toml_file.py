"""A fleet's TOML file as tables whose keys and types are checked. Every mistake is a ConfigError that names
the key and what is possible."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.errors import ConfigError
from shoal.fields import kind_of

T = TypeVar("T")


def read_document(path: str | Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not there or no TOML. It may begin with the byte order mark that
    editors of Windows write."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None


def table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of this name, or an empty one. Raises ConfigError if it is something else."""
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {value!r} is no table; write [{name}]")
    return value


def tables(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables that are written [[name]] one after the other. Raises ConfigError for something else."""
    entries = document.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{name} is no list of tables; write [[{name}]]")
    return entries


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises ConfigError for a key that is not known. It names all that are, and the nearest."""
    names = sorted(known)
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"{name!r} is no key of {where}; there are {', '.join(names)}{hint}")


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass `kind` with these fields, whose types have to be those of TOML; an integer passes for a
    float. Raises ConfigError for another type, and what the class itself raises."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        inner, _ = kind_of(hints[name])
        if dataclasses.is_dataclass(inner):
            continue  # an option with fields of its own checks these itself
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            shown = getattr(inner, "__name__", str(inner)) if not typing.get_args(inner) else str(inner)
            raise ConfigError(f"{name} {value!r:.200} is not of the type {shown}") from None
    return kind(**values)


def keys_of(kind: type) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]
