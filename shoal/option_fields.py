"""Options as dataclass fields: each says once what it means and which values are possible.

`--help`, the tables in docs/ and the checks all read these fields, so none of them can differ from another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
    """A dataclass field that is an option. default: MISSING for one that must be given.

    help: its meaning. common: `--help` shows it; `--help-all` shows every option. section: the heading above
    this field and above those after it, up to the next field that has one. The rest are `Limits`.
    """
    limits = Limits(low=low, above=above, high=high, choices=choices)
    metadata = {"help": help, "common": common, "section": section, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any, error: type[Exception], prefix: str = "") -> None:
    """Raises `error` for the first option that is a number, a yes or no, or a word of several and whose value
    is none of these or outside its limits. None is possible where the type of the field says so. `prefix`
    comes before the field's name in the message. Most values are the field's default, and are not looked at,
    which halves the time."""
    for check in _checks(config.__class__):
        value = getattr(config, check.name)
        if value is not check.default and not check.allows(value):
            raise error(f"{prefix}{check.name} {value!r:.200} {_complaint(check.kind, check.limits)}")


class _Check:
    """A field's limits and its default, prepared for the check of a value."""

    __slots__ = (
        "above",
        "choices",
        "default",
        "high",
        "kind",
        "kinds",
        "limits",
        "low",
        "may_be_none",
        "name",
    )

    def __init__(self, name: str, hint: Any, limits: Limits, default: Any) -> None:
        self.name, self.limits, self.default = name, limits, default
        self.kind, self.may_be_none = kind_of(hint)
        self.kinds = int if self.kind is int else (int, float)
        most = MOST_INTEGER if self.kind is int else sys.float_info.max
        if limits == Limits():
            most = math.inf
        self.low = -most if limits.low is None else limits.low
        self.high = most if limits.high is None else limits.high
        self.above = -math.inf if limits.above is None else limits.above
        self.choices = limits.choices

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.may_be_none
        if self.choices:
            return value in self.choices
        if self.kind is bool:
            return getattr(value, "shape", ()) == () and value in (0, 1)  # numpy's and torch's as well
        if not isinstance(value, self.kinds) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and value > self.above  # never true of NaN


@functools.cache
def _checks(config: type) -> list[_Check]:
    """Returns a check for each option of which more is known than that it is a text or a list."""
    hints = typing.get_type_hints(config)
    checks = [
        _Check(field.name, hints[field.name], field.metadata["limits"], field.default)
        for field in dataclasses.fields(config)
        if "limits" in field.metadata
    ]
    return [check for check in checks if check.limits != Limits() or check.kind in (bool, int)]


def described(config: type) -> str:
    """A line for each field: name, type, default and meaning. For the docstrings of what takes them as
    arguments."""
    lines = []
    for field in dataclasses.fields(config):
        lines.append(f"    {field.name}: {field.type} = {field.default!r}\n        {field.metadata['help']}")
    return "\n".join(lines)


def kind_of(hint: Any) -> tuple[Any, bool]:
    """A field's type without None, and whether it may be None."""
    if not isinstance(hint, types.UnionType):
        return hint, False
    kinds = typing.get_args(hint)
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def _complaint(kind: type, limits: Limits) -> str:
    """Says which values are possible."""
    if limits.choices:
        return f"is not one of {', '.join(limits.choices)}"
    if kind is bool:
        return "is neither True nor False; give one of them"
    if limits == Limits():
        return "is not an integer; give one"
    if kind is int:
        low = "-2^63" if limits.low is None else f"{limits.low}"
        high = "2^63 - 1" if limits.high is None else f"{limits.high}"
        return f"is not an integer from {low} to {high}; choose one"
    return f"is outside {interval(limits)}; choose a finite number inside it"


def interval(limits: Limits) -> str:
    """Writes limits as an interval, such as [0, 1], (0, 1] or [0, inf)."""
    if limits.above is not None:
        begin = f"({limits.above:g}"
    else:
        begin = "(-inf" if limits.low is None else f"[{limits.low:g}"
    return f"{begin}, {'inf)' if limits.high is None else f'{limits.high:g}]'}"
