"""Calls behind marks within text, whatever the calls themselves look like."""

from __future__ import annotations

from collections.abc import Collection, Generator

from shoal.server.tool_parsers import SPACE, CallReader, Steps, length_of_start


class MarkedCalls(CallReader):
    """Text in which each opening mark begins one call or several; white space around them is dropped. A
    subclass says by `_calls` what follows a mark."""

    openings: tuple[str, ...]
    closing = ""  # the mark behind a call, if there is one; another one stays text
    bare = ""  # the character with which calls may begin an answer without a mark

    def __init__(self, names: Collection[str] | None = None, is_whole: bool = False) -> None:
        """`names`: calls of other tools count as text."""
        self._names = names
        self._unclosed = False  # the closing mark of a call is still to come
        super().__init__(is_whole)

    def _run(self) -> Steps:
        if self.bare:
            length = 1
            while (seen := (yield from self._ahead(length))).isspace() and len(seen) == length:
                length += 1
            if seen.endswith(self.bare):
                self._at += length - 1
                yield from self._calls(seen[:-1])
        while (markup := (yield from self._prose())) is not None:
            yield from self._calls(markup)

    def _calls(self, markup: str) -> Steps:
        """Reads calls that follow one another. `markup` is what was skipped before the first."""
        raise NotImplementedError

    def _prose(self) -> Generator[None, None, str | None]:
        """Gives content up to an opening mark and skips the mark. Returns what it skipped, or None at the end
        of the text."""
        marks = (*self.openings, self.closing)
        while True:
            rest = self._text[self._at :]
            found = [(at, mark) for mark in self.openings if (at := rest.find(mark)) >= 0]
            start, opening = min(found, default=(-1, ""))
            end = rest.find(self.closing) if self.closing and self._unclosed else -1
            if end >= 0 and (start < 0 or end < start):
                self._unclosed = False
                self._give_content(rest[:end].rstrip(SPACE))
                self._at += end + len(self.closing)
                yield from self._skip(SPACE)
                continue
            if start >= 0:
                solid = rest[:start].rstrip(SPACE)
                self._give_content(solid)
                self._at += start + len(opening)
                return rest[len(solid) : start] + opening
            if self._is_ended:
                self._give_content(rest.rstrip(SPACE) if self._index >= 0 else rest)
                return None
            held = max(length_of_start(rest, mark) for mark in marks)
            solid = rest[: len(rest) - held].rstrip(SPACE)
            self._give_content(solid)
            self._at += len(solid)
            yield
