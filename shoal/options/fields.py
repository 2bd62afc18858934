"""Options as dataclass fields, each with its help and its possible values.

`--help`, the tables in docs/ and the checks all read these fields, so they always agree.
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

from shoal.errors import UserError

MOST_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The possible values of a field. Numbers are finite. `choices`: all possible words."""

    low: float | None = None
    above: float | None = None  # in place of `low`, if the bound itself is not allowed
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
    """Returns a dataclass field that is an option. default: MISSING for a required one.

    common: `--help` shows the option; `--help-all` shows all. section: the heading of this field and the
    following ones, up to the next field with a section. The other arguments are `Limits`.
    """
    limits = Limits(low=low, above=above, high=high, choices=choices)
    metadata = {"help": help, "common": common, "section": section, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any, error: type[UserError], prefix: str = "") -> None:
    """Raises `error` for the first number, bool or choice whose value has the wrong type or is outside its
    limits. None is allowed where the type of the field says so. `prefix` precedes the field's name in the
    message. Default values are not checked, which halves the time."""
    for check in _checks(config.__class__):
        value = getattr(config, check.name)
        if value is not check.default and not check.allows(value):
            name = f"{prefix}{check.name}"
            raise error(f"{name} must be {_constraint(check)}, got {value!r:.200}; choose one", field=name)


class _Check:
    """A field's limits and default, prepared for checking values."""

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
            return getattr(value, "shape", ()) == () and value in (0, 1)  # also bools of numpy and torch
        if not isinstance(value, self.kinds) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and value > self.above  # false for NaN


@functools.cache
def _checks(config: type) -> list[_Check]:
    """Returns a check for each option that is a number, a bool or a choice."""
    hints = typing.get_type_hints(config)
    checks = [
        _Check(field.name, hints[field.name], field.metadata["limits"], field.default)
        for field in dataclasses.fields(config)
        if "limits" in field.metadata
    ]
    return [check for check in checks if check.limits != Limits() or check.kind in (bool, int)]


def described(config: type) -> str:
    """Returns a line for each field (name, type, default, help), for docstrings of functions with these
    arguments."""
    lines = []
    for field in dataclasses.fields(config):
        lines.append(f"    {field.name}: {field.type} = {field.default!r}\n        {field.metadata['help']}")
    return "\n".join(lines)


def kind_of(hint: Any) -> tuple[Any, bool]:
    """Returns a field's type without None, and True if the field may be None."""
    if not isinstance(hint, types.UnionType):
        return hint, False
    kinds = typing.get_args(hint)
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def _constraint(check: _Check) -> str:
    """Returns the possible values, in words."""
    limits = check.limits
    if limits.choices:
        return f"one of {', '.join(limits.choices)}"
    if check.kind is bool:
        return "True or False"
    if limits == Limits():
        return "an integer"
    if check.kind is int:
        low = "-2^63" if limits.low is None else f"{limits.low}"
        high = "2^63 - 1" if limits.high is None else f"{limits.high}"
        return f"an integer from {low} to {high}"
    return f"a finite number in {interval(limits)}"


def interval(limits: Limits) -> str:
    """Returns limits as an interval, such as [0, 1], (0, 1] or [0, inf)."""
    if limits.above is not None:
        begin = f"({limits.above:g}"
    else:
        begin = "(-inf" if limits.low is None else f"[{limits.low:g}"
    return f"{begin}, {f'{limits.high:g}]' if limits.high is not None else 'inf)'}"
