"""The stats of a fleet's workers as those of one engine, for whoever knows one only: `/metrics` above all.

What an engine counts since its start never falls, and Prometheus takes a fall for a start at 0: it would add
all that the other workers have done once more. So what a worker has counted stays when it is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shoal.stats import Stats

MAX_GONE = 16  # workers that are remembered one by one, as they may come back with what they had


class SummedStats:
    def __init__(self) -> None:
        self._past = Stats()  # what engines have counted that do not come back
        self._seen: dict[str, Stats] = {}  # the last stats by address, those of workers that are gone first

    def of(self, stats: Mapping[str, Stats]) -> Stats:
        """The sum of these, by their workers' addresses, and of what workers have counted that are gone."""
        for address, one in stats.items():
            before = self._seen.pop(address, None)
            if before is not None and _has_fallen(counted(before), counted(one)):
                self._add_past(before)  # its engine has been started again
            self._seen[address] = one
        while len(self._seen) > len(stats) + MAX_GONE:
            self._add_past(self._seen.pop(next(iter(self._seen))))
        gone = [counted(one) for address, one in self._seen.items() if address not in stats]
        return sum_of([*stats.values(), *gone, self._past])

    def _add_past(self, stats: Stats) -> None:
        self._past = sum_of([self._past, counted(stats)])


def sum_of(parts: Sequence[Stats]) -> Stats:
    """Stats of several engines as those of one: counts and sizes are added, and of times that engines have
    measured, those that are known are averaged."""
    return cast(Stats, _sum(parts, False))


def counted(stats: Stats) -> Stats:
    """What of it is counted since the engine's start, and nothing of what it has or does now."""
    return cast(Stats, _counted(stats))


def _has_fallen(before: Any, now: Any) -> bool:
    """Whether anything is less than it was, in stats of which only counts are left."""
    if before is None or now is None:
        return False
    if dataclasses.is_dataclass(before):
        names = [field.name for field in dataclasses.fields(before)]
        return any(_has_fallen(getattr(before, name), getattr(now, name)) for name in names)
    if isinstance(before, dict):
        return any(_has_fallen(before[key], now[key]) for key in before.keys() & now.keys())
    if isinstance(before, list):
        return any(_has_fallen(*pair) for pair in zip(before, now))
    return isinstance(before, int | float) and now < before


def _sum(parts: Sequence[Any], is_counted: bool) -> Any:
    parts = [one for one in parts if one is not None]  # of an engine that has no such thing
    if not parts:
        return None
    first = parts[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                field.name: _sum([getattr(one, field.name) for one in parts], "since_start" in field.metadata)
                for field in dataclasses.fields(first)
            }
        )
    if isinstance(first, dict):
        keys = dict.fromkeys(key for one in parts for key in one)
        return {key: _sum([one[key] for one in parts if key in one], is_counted) for key in keys}
    if isinstance(first, list):
        return [sum(values) for values in zip(*parts)]
    if isinstance(first, float) and not is_counted:
        known = [one for one in parts if one]
        return sum(known) / len(known) if known else 0.0
    return sum(parts)


def _counted(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _counted(one) for key, one in part.items()}
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return type(part)() if isinstance(part, int | float) else part
    return dataclasses.replace(
        part,
        **{
            field.name: _counted(getattr(part, field.name))
            for field in dataclasses.fields(part)
            if "since_start" not in field.metadata
        },
    )
