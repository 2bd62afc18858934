"""Options as dataclass fields: each says once what it means and which values are possible.

`--help`, the tables in docs/ and the checks all read these fields, so none of them can differ from another.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any

MOST_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Which values a field may have. A number is finite. `choices` names all values there are."""

    low: float | None = None
    above: float | None = None  # in place of `low`, where the bound itself is not allowed
    high: float | None = None
    choices: tuple[str, ...] = ()


def option(
    default: Any,
    help: str,
    *,
    common: bool = False,
    section: str | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is an option.

    help: its meaning. common: `--help` shows it; `--help-all` shows every option. section: the heading above
    this field and above those after it, up to the next field that has one. The rest are `Limits`.
    """
    limits = Limits(low=low, above=above, high=high, choices=choices)
    metadata = {"help": help, "common": common, "section": section, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any, error: type[Exception], prefix: str = "") -> None:
    """Raises `error` for the first field whose value is outside its limits. None is possible where the type
    of the field says so. `prefix` comes before the field's name in the message."""
    for name, kind, optional, limits in _limited_fields(config.__class__):
        value = getattr(config, name)
        if (value is None and optional) or _is_within(value, kind, limits):
            continue
        raise error(f"{prefix}{name} {value!r:.200} {_complaint(kind, limits)}")


@functools.cache
def _limited_fields(config: type) -> list[tuple[str, type, bool, Limits]]:
    """(name, type without None, whether it may be None, limits) of each field that has limits."""
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        limits = field.metadata.get("limits")
        if limits is not None and limits != Limits():
            kind, optional = kind_of(hints[field.name])
            found.append((field.name, kind, optional, limits))
    return found


def kind_of(hint: Any) -> tuple[Any, bool]:
    """A field's type without None, and whether it may be None."""
    if not isinstance(hint, types.UnionType):
        return hint, False
    kinds = typing.get_args(hint)
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def _is_within(value: Any, kind: type, limits: Limits) -> bool:
    if limits.choices:
        return value in limits.choices
    if not isinstance(value, int if kind is int else (int, float)) or isinstance(value, bool):
        return False
    return (
        abs(value) <= (MOST_INTEGER if kind is int else sys.float_info.max)  # NaN is not, either
        and (limits.low is None or value >= limits.low)
        and (limits.above is None or value > limits.above)
        and (limits.high is None or value <= limits.high)
    )


def _complaint(kind: type, limits: Limits) -> str:
    """What is wrong with a value that is not possible, and which are."""
    if limits.choices:
        return f"is not one of {', '.join(limits.choices)}"
    if kind is int:
        low = "-2^63" if limits.low is None else f"{limits.low}"
        high = "2^63 - 1" if limits.high is None else f"{limits.high}"
        return f"is not an integer from {low} to {high}; choose one"
    return f"is outside {interval(limits)}; choose a finite number inside it"


def interval(limits: Limits) -> str:
    """[0, 1], (0, 1] or [0, inf)."""
    if limits.above is not None:
        begin = f"({limits.above:g}"
    else:
        begin = "(-inf" if limits.low is None else f"[{limits.low:g}"
    return f"{begin}, {'inf)' if limits.high is None else f'{limits.high:g}]'}"
