"""A fleet's TOML file as tables whose keys and types are checked. Every mistake is a ConfigError that names
the key and what is possible."""

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
from shoal.option_fields import kind_of

CLOSE = 0.65  # how similar a key has to be to stand in for the list of all keys

T = TypeVar("T")


def read_document(path: str | Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is missing or not TOML. It may begin with the byte order mark that
    editors of Windows write."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: it is not UTF-8
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read as TOML: {error}{_advice(text, str(error))}"
        ) from None


def _advice(text: str, mistake: str) -> str:
    """Shows the line that a mistake of TOML is in, with its value in quotes where only these are missing."""
    found = re.search(r"at line (\d+)", mistake)
    line = text.split("\n")[int(found[1]) - 1].strip() if found is not None else ""
    key, equals, value = line.partition("=")
    value = value.partition("#")[0].strip()
    is_value = mistake.startswith(("Invalid value", "Expected newline"))
    if is_value and equals and re.fullmatch(r"[^\s\"'\[\]{},]+", value):
        return f'; text stands in quotes: {key.strip()} = "{value}"'
    return f"; the line is: {line:.200}" if line else ""


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


def check_keys(
    given: Iterable[str], known: Iterable[str], where: str, removed: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError for a key that is not known. It names the nearest one, or else all. `removed`: for
    each key of earlier releases, why it was removed."""
    names = sorted(known)
    for name in given:
        if removed is not None and name in removed:
            raise ConfigError(f"{where} has {name}, which was removed: {removed[name]}; leave it out")
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(names)}"
            raise ConfigError(f"unknown key {name!r} in {where}; {hint}")


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
