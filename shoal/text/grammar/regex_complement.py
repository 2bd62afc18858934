"""Builds the regex of all texts that do not begin with a match of another regex, for grammar compilers
without negation: negative look-aheads of JSON schemas become such regexes.

The regex becomes an automaton, whose accepting states are exchanged with the others, and states are
eliminated one by one until one regex remains. Both steps are bounded, because a regex comes from a request.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

MAX_STATES = 300  # states of the nondeterministic automaton
MAX_SETS = 40  # states of the deterministic automaton; few suffice for usual look-aheads
MAX_LENGTH = 8_000  # characters of the result
HIGHEST = 0x10FFFF
END = HIGHEST + 1  # follows the last character of every text, so that `$` is a step

Ranges = tuple[tuple[int, int], ...]
ANY: Ranges = ((0, END),)
# Characters in a class that Python warns about, as they may mean set operations in the future.
AMBIGUOUS = re.compile(r"\[[^\]]*(\[|--|&&|~~|\|\|)")
CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": ((48, 57),),
    "CATEGORY_WORD": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "CATEGORY_SPACE": ((9, 13), (32, 32), (0xA0, 0xA0), (0x2028, 0x2029), (0xFEFF, 0xFEFF)),
}


@functools.lru_cache(maxsize=256)
def complement(regex: str) -> str | None:
    """Returns a regex, to be matched against whole texts, of the texts without a match of `regex` at their
    beginning. Returns None if `regex` has parts beyond automata, or if the result is too large."""
    if AMBIGUOUS.search(regex):
        return None
    try:
        tree = re._parser.parse(regex)  # type: ignore[attr-defined]
        automaton = _Automaton()
        last = automaton.add(tree, 0)
        automaton.step(last, ANY, last)
        return _written(*automaton.exchanged(last))
    except (_TooHard, re.error, RecursionError, OverflowError):
        return None


class _TooHard(Exception):
    """Raised for a regex that is not supported, or costs too much."""


class _Automaton:
    """An automaton with numbered states. Steps have ranges of characters, or are empty."""

    def __init__(self) -> None:
        self._steps: list[list[tuple[Ranges, int]]] = [[]]
        self._free: list[list[int]] = [[]]  # steps without a character

    def step(self, start: int, ranges: Ranges, end: int) -> None:
        self._steps[start].append((ranges, end))

    def add(self, tree: Iterable[Any], start: int) -> int:
        """Adds states that match `tree` from the state `start`, and returns the last one."""
        for operation, given in tree:
            match str(operation):
                case "LITERAL":
                    start = self._added(start, ((given, given),))
                case "NOT_LITERAL":
                    start = self._added(start, _inverse(((given, given),)))
                case "ANY":
                    start = self._added(start, _inverse(((10, 10),)))
                case "IN":
                    start = self._added(start, _class(given))
                case "SUBPATTERN" if not given[1] and not given[2]:
                    start = self.add(given[3], start)
                case "BRANCH":
                    ends = [self.add(branch, start) for branch in given[1]]
                    start = self._new()
                    for end in ends:
                        self._free[end].append(start)
                case "MAX_REPEAT" | "MIN_REPEAT":
                    start = self._repeated(given[0], given[1], given[2], start)
                case "AT" if str(given) == "AT_END":
                    start = self._added(start, ((END, END),))
                case "AT" if str(given) == "AT_BEGINNING" and start == 0:
                    pass
                case _:
                    raise _TooHard
        return start

    def _repeated(self, least: int, most: Any, tree: Any, start: int) -> int:
        for _ in range(least):
            start = self.add(tree, start)
        after = self._new()
        if str(most) == "MAXREPEAT":
            again = self._new()
            self._free[start].append(again)
            self._free[self.add(tree, again)].append(again)
            self._free[again].append(after)
            return after
        for _ in range(most - least):
            self._free[start].append(after)
            start = self.add(tree, start)
        self._free[start].append(after)
        return after

    def _added(self, start: int, ranges: Ranges) -> int:
        end = self._new()
        self.step(start, ranges, end)
        return end

    def _new(self) -> int:
        if len(self._steps) == MAX_STATES:
            raise _TooHard
        self._steps.append([])
        self._free.append([])
        return len(self._steps) - 1

    def exchanged(self, last: int) -> tuple[list[dict[int, list[tuple[int, int]]]], list[int]]:
        """Returns the automaton of texts that do not lead to the state `last`: for each state the ranges that
        lead to each next one, and the states in which a text may end. State 0 is the first."""
        edges = sorted(
            {edge for steps in self._steps for ranges, _ in steps for a, b in ranges for edge in (a, b + 1)}
            | {0, END}
        )
        first = self._closure({0})
        numbers, todo = {first: 0}, [first]
        moves: list[dict[int, list[tuple[int, int]]]] = []
        ends: list[int] = []
        for states in todo:  # grows as states are found
            move: dict[int, list[tuple[int, int]]] = {}
            for low, following in itertools.pairwise(edges):
                target = self._closure(
                    {
                        to
                        for state in states
                        for ranges, to in self._steps[state]
                        if any(a <= low <= b for a, b in ranges)
                    }
                )
                if low == END:
                    if last not in target:
                        ends.append(len(moves))
                elif last not in target:  # every longer text leads there, too
                    if target not in numbers:
                        if len(numbers) == MAX_SETS:
                            raise _TooHard
                        numbers[target] = len(todo)
                        todo.append(target)
                    move.setdefault(numbers[target], []).append((low, following - 1))
            moves.append(move)
        return ([], []) if last in first else (moves, ends)

    def _closure(self, states: set[int]) -> frozenset[int]:
        todo = list(states)
        while todo:
            for state in self._free[todo.pop()]:
                if state not in states:
                    states.add(state)
                    todo.append(state)
        return frozenset(states)


def _class(items: Any) -> Ranges:
    ranges: list[tuple[int, int]] = []
    is_inverse = False
    for operation, given in items:
        match str(operation):
            case "NEGATE":
                is_inverse = True
            case "LITERAL":
                ranges.append((given, given))
            case "RANGE":
                ranges.append(given)
            case "CATEGORY":
                name = str(given)
                known = CATEGORIES[name.replace("_NOT_", "_")]
                ranges += _inverse(known) if "_NOT_" in name else known
            case _:
                raise _TooHard
    return _inverse(tuple(ranges)) if is_inverse else tuple(ranges)


def _inverse(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for a, b in sorted(ranges):
        if low < a:
            found.append((low, a - 1))
        low = max(low, b + 1)
    return (*found, (low, HIGHEST)) if low <= HIGHEST else tuple(found)


def _written(moves: list[dict[int, list[tuple[int, int]]]], ends: list[int]) -> str | None:
    """Returns the regex of an automaton by eliminating its states; None if it accepts no text."""
    first, final = -1, -2
    ways: dict[tuple[int, int], str] = {(first, 0): ""} if moves else {}
    ways |= {(end, final): "" for end in ends if moves}
    for state, move in enumerate(moves):
        for to, ranges in move.items():
            ways[state, to] = _class_text(ranges)
    for state in reversed(range(len(moves))):
        loop = ways.pop((state, state), None)
        again = f"(?:{loop})*" if loop else ""
        into = [(a, way) for (a, b), way in ways.items() if b == state]
        out = [(b, way) for (a, b), way in ways.items() if a == state]
        ways = {pair: way for pair, way in ways.items() if state not in pair}
        for a, before in into:
            for b, after in out:
                way = f"{before}{again}{after}"
                if (other := ways.get((a, b))) is not None:
                    way = f"(?:{other}|{way})"
                if len(way) > MAX_LENGTH:
                    raise _TooHard
                ways[a, b] = way
    return ways.get((first, final))


def _class_text(ranges: list[tuple[int, int]]) -> str:
    joined: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if joined and joined[-1][1] == a - 1:
            a = joined.pop()[0]
        joined.append((a, b))
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in joined) + "]"
