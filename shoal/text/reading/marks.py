"""Texts that a format waits for: where one is, and how much of an answer's end may begin one."""

from __future__ import annotations

import functools
import re

SPACE = " \t\r\n"
NEVER = "(?!)"


class Marks:
    """A set of marks as compiled patterns.

    `find`: the first mark, the longest of several at one place. `begun`: the end of a text that may begin a
    mark. `stirs`: a character that may begin a mark, or white space at the end that may be trimmed; a text
    without either can be passed on at once.
    """

    def __init__(self, marks: tuple[str, ...], trims: bool) -> None:
        """trims: white space before a mark belongs to neither part."""
        self._trims = trims
        ordered = sorted(marks, key=len, reverse=True)
        starts = {mark[:n] for mark in marks for n in range(1, len(mark))}
        firsts = "".join(sorted({re.escape(mark[0]) for mark in marks}))
        self.find = re.compile("|".join(map(re.escape, ordered)) or NEVER).search
        self.begun = re.compile(f"(?:{_any(starts)})\\Z").search
        ends = [f"[{SPACE}]\\Z"] if trims else []
        self.stirs = re.compile("|".join([f"[{firsts}]"] * bool(firsts) + ends) or NEVER).search
        self.longest = max(map(len, marks), default=0)

    def trimmed(self, text: str) -> str:
        return text.rstrip(SPACE) if self._trims else text


def _any(texts: set[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or NEVER


@functools.lru_cache(maxsize=1024)
def marks_of(*marks: str, trims: bool = True) -> Marks:
    return Marks(marks, trims)
