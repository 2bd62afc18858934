"""A fleet's TOML file as tables with checked keys and types. Every error is a ConfigError that names the key
and the possible values."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.errors import ConfigError
from shoal.options.fields import kind_of

CLOSE = 0.65  # least similarity of a key that is suggested

T = TypeVar("T")


def read_document(path: str | Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is missing or not TOML. It may begin with the byte order mark that
    editors of Windows write."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}; name a TOML file") from None
    except ValueError as error:  # it is not UTF-8
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read as TOML: {error}{_advice(text, str(error))}"
        ) from None


def _advice(text: str, mistake: str) -> str:
    """Returns a hint with the line of a TOML error, with its value in quotes if only these are missing."""
    found = re.search(r"at line (\d+)", mistake)
    line = text.split("\n")[int(found[1]) - 1].strip() if found is not None else ""
    key, equals, value = line.partition("=")
    value = value.partition("#")[0].strip()
    is_value = mistake.startswith(("Invalid value", "Expected newline"))
    if is_value and equals and re.fullmatch(r"[^\s\"'\[\]{},]+", value):
        return f'; text must be in quotes: {key.strip()} = "{value}"'
    return f"; the line is: {line:.200}" if line else ""


def table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the table of this name, or an empty one. Raises ConfigError for another type."""
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a table, got {value!r:.200}; write [{name}]")
    return value


def tables(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the tables that are written as [[name]]. Raises ConfigError for another type."""
    entries = document.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{name} must be a list of tables; write [[{name}]]")
    return entries


def check_keys(
    given: Iterable[str], known: Iterable[str], where: str, removed: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError for an unknown key, which suggests the nearest key or lists all. `removed`: for each
    key of earlier releases, why it was removed."""
    names = sorted(known)
    for name in given:
        if removed is not None and name in removed:
            raise ConfigError(f"{where} has {name}, which was removed: {removed[name]}; leave it out")
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(names)}"
            raise ConfigError(f"unknown key {name!r} in {where}; {hint}")


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Builds the dataclass `kind` from these fields and checks their types; an integer is accepted for a
    float. Raises ConfigError for another type, and the exceptions of the class."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        inner, _ = kind_of(hints[name])
        if dataclasses.is_dataclass(inner):
            continue  # an option with nested fields checks them itself
        try:
            msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            shown = getattr(inner, "__name__", str(inner)) if not typing.get_args(inner) else str(inner)
            raise ConfigError(f"{name} must be of the type {shown}, got {value!r:.200}; give one") from None
    return kind(**values)


def keys_of(kind: type) -> list[str]:
    """Returns the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]
