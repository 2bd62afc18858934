"""`SummedStats`: the stats of a model's workers as the stats of one engine, for `/metrics` above all.
FleetEngine (fleet_engine.py) passes the workers' last reports.

A counter never falls, and Prometheus takes a fall for a restart at 0: it would add the counts of all other
workers once more. So the counts of a worker that left stay in the sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shoal.stats import Stats

MAX_GONE = 16  # workers that left and are kept apart, as they may return with their counts


class SummedStats:
    """Sums the stats of workers that come and go, so that no sum of counters falls."""

    def __init__(self) -> None:
        self._past = Stats()  # counts of engines that do not return
        self._seen: dict[str, Stats] = {}  # the last stats by address, workers that left first

    def of(self, stats: Mapping[str, Stats]) -> Stats:
        """Returns the sum of these stats, by worker address, and of the counts of workers that left."""
        for address, one in stats.items():
            before = self._seen.pop(address, None)
            if before is not None and _has_fallen(counted(before), counted(one)):
                self._add_past(before)  # its engine has restarted
            self._seen[address] = one
        while len(self._seen) > len(stats) + MAX_GONE:
            self._add_past(self._seen.pop(next(iter(self._seen))))
        gone = [counted(one) for address, one in self._seen.items() if address not in stats]
        return sum_of([*stats.values(), *gone, self._past])

    def _add_past(self, stats: Stats) -> None:
        self._past = sum_of([self._past, counted(stats)])


def sum_of(parts: Sequence[Stats]) -> Stats:
    """Returns stats of several engines as stats of one: counts and sizes are added, known times are
    averaged."""
    return cast(Stats, _sum(parts, False))


def counted(stats: Stats) -> Stats:
    """Returns the stats with their counters alone; gauges are 0."""
    return cast(Stats, _counted(stats))


def _has_fallen(before: Any, now: Any) -> bool:
    """Returns whether any count has decreased, in stats from `counted`."""
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
    parts = [one for one in parts if one is not None]  # absent in some engines
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
