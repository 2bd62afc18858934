"""The machine of all formats: an answer's text as it arrives, and the parts that are found in it.

A format reads the text by sequential code that pauses (a generator's `yield`) where the available text ends.
So what is found depends on the text alone, never on its pieces. A call is recognized when its name is known
and its arguments begin; until then its text is held back, and becomes content if it turns out to be text.
After that the arguments stream. Only a broken call is read differently if the answer arrives as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.text.reading.marks import SPACE, Marks, marks_of
from shoal.text.reading.parts import CallDelta, Part, TextDelta
from shoal.text.reading.thoughts import Start, Thoughts

Steps = Generator[None, None, None]
Schemas = Mapping[str, dict[str, Any]]  # schema of the arguments by the tool's name
MAX_NAME = 256  # characters; longer names are text
LETTER = re.compile(r"\w")


class Malformed(Exception):
    """Raised for a text that is not a call."""


class Ended(Malformed):
    """Raised for text that ends within a call. The rest is an incomplete escape or number without use."""


class Form(Protocol):
    """The side of a format (chat_format.py) that the machine calls."""

    def answer(self, reader: Reader) -> Steps: ...

    def calls(self, reader: Reader, mark: str) -> Steps: ...

    def new_id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Expected:
    """The possible parts of an answer: calls of these tools, and reasoning."""

    schemas: Schemas = field(default_factory=dict)
    names: Collection[str] | None = None  # the only names that are calls; None: all
    takes_calls: bool = True  # False: calls are text
    thoughts: Thoughts | None = None
    start: Start = Start.UNKNOWN  # the place where the answer begins, by its prompt


class Reader:
    """The text of one answer, and its parts.

    Arguments are always the beginning of a JSON object, as clients parse them while they arrive: malformed
    ones end at the error, and the rest is content. If an answer is read as a whole, the client has not seen
    the beginning of a broken call, so all of it is content, as in vLLM. A call that the token limit cuts
    stays a call in both.
    """

    def __init__(self, form: Form, expected: Expected, is_whole: bool = False) -> None:
        """is_whole: the whole text arrives by one push."""
        self.form, self.expected = form, expected
        self.index = -1  # the number of the last recognized call
        self.broken: int | None = None  # the first call whose arguments are not whole, so it cannot be made
        self.is_closing = False  # the mark after calls is expected
        self._ids: set[str] = set()
        self._is_whole = is_whole
        self._text, self._at, self.is_ended, self._is_cut = "", 0, False, False
        # The current call. Its text is kept, as it may turn out to be content.
        self._raw: list[str] = []
        self._begun, self._is_complete, self._num_before = False, False, 0
        self._arguments: list[str] = []  # not emitted yet
        self._num_arguments = 0
        self.copies = False  # text that is taken belongs to the arguments
        self.separator = ""  # the text that comes before further words
        self._parts: list[Part] = []
        # While no mark has begun: the pattern of text that cannot be passed on at once, and its kind.
        self._stirs: Callable[[str], re.Match[str] | None] | None = None
        self._is_reasoning = False
        self._steps = form.answer(self)

    def push(self, text: str, end: str | None = None) -> list[Part]:
        """Returns the parts that `text` adds, in their order. end: the reason why the answer ends with it;
        nothing is held back then."""
        if self._stirs is not None and end is None and not self._stirs(text):
            return [TextDelta(text, self._is_reasoning)] if text else []
        self._stirs = None
        self._text, self._at = self._text[self._at :] + text, 0
        self.is_ended, self._is_cut = end is not None, end == "length"
        next(self._steps, None)
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    # Output

    def say(self, text: str, reasoning: bool = False) -> None:
        if self.separator and text:
            text, self.separator = self.separator + text, ""
        last = self._parts[-1] if self._parts else None
        if text and isinstance(last, TextDelta) and last.reasoning == reasoning:
            last.text += text
        elif text:
            self._parts.append(TextDelta(text, reasoning))

    def begin(self, name: str, call_id: str = "") -> None:
        """The current text is a call of this tool. call_id: the model's own, if it writes ids."""
        if not call_id or call_id in self._ids:
            call_id = self.form.new_id()
        self._ids.add(call_id)
        self.index += 1
        self._begun, self._num_before = True, len(self._parts)
        self._parts.append(CallDelta(self.index, call_id, name))
        self._is_sent()

    def add(self, arguments: str) -> None:
        """Adds to the JSON of the arguments."""
        self._arguments.append(arguments)
        self._is_sent()

    def add_key(self, key: str) -> None:
        """Adds the beginning of an argument; `key` is JSON."""
        self.add(f"{', ' if self._num_arguments else '{'}{key}: ")
        self._num_arguments += 1

    def end_arguments(self) -> None:
        """Ends arguments that were added by keys."""
        self.add("}" if self._num_arguments else "{}")
        self.complete()

    def complete(self) -> None:
        """The current call has its name and all of its arguments."""
        self._is_complete = True
        self._raw.clear()
        self._flush()

    def _is_sent(self) -> None:
        """The text that was taken is in the call's delta. Only a whole answer may take a call back."""
        if self._begun and not self._is_whole:
            self._raw.clear()

    def _flush(self) -> None:
        if not self._begun or not (arguments := "".join(self._arguments)):
            return
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, CallDelta):
            last = CallDelta(self.index)
            self._parts.append(last)
        last.arguments += arguments
        self._arguments.clear()

    # Calls

    def next_call(self) -> None:
        """Begins to read another call."""
        self._flush()
        self._arguments.clear()
        if self._begun:
            self._raw.clear()
        self._begun = self._is_complete = self.copies = False
        self._num_arguments = 0

    def read_calls(self, gap: str, mark: str) -> Generator[None, None, bool]:
        """Reads the calls that follow white space and a mark, which are content if there is no call. Returns
        False then."""
        index = self.index
        self.next_call()
        self._raw = [gap + mark]
        try:
            yield from self.form.calls(self, mark)
        except Malformed as error:
            self._give_up(isinstance(error, Ended))
        if self.index == index:
            return False
        self.is_closing = True
        yield from self.skip(SPACE)
        return True

    def read_bare_calls(self, first: str) -> Steps:
        """Reads calls without a mark if `first` comes next."""
        length = yield from self.blank()
        if (yield from self.sees(first, length)):
            self._at += length
            yield from self.read_calls(self._text[self._at - length : self._at], "")

    def read_calls_alone(self, mark: str, closing: str, openings: tuple[str, ...]) -> bool:
        """Returns True if the rest of a text that has ended is calls and nothing else, the first one after
        `mark`; otherwise nothing is read."""
        at, index, is_whole, parts = self._at, self.index, self._is_whole, self._parts
        broken, self._is_whole, self._parts = self.broken, True, []
        found = True
        while mark and found:
            if mark != closing:
                [found] = _returned(self.read_calls("", mark))
                found = found and self._is_complete
            [mark] = _returned(self.one_of(*filter(None, (closing, *openings))))
        found = found and self._at == len(self._text)
        self._is_whole = is_whole
        if found:
            self._parts = parts + self._parts
        else:
            self._parts, self._at, self.index = parts, at, index
            self.broken, self.is_closing = broken, False
        return found

    def _give_up(self, is_ended: bool) -> None:
        """Ends a call that turned out to be text, or that ends early."""
        self.copies = False
        was_cut = is_ended and self._is_cut
        is_broken = self._begun and not self._is_complete
        if is_broken and self._is_whole and not was_cut:
            del self._parts[self._num_before :]
            self.index, self._begun = self.index - 1, False
            self._arguments.clear()
        elif is_broken and self.broken is None:
            self.broken = self.index
        loose = "".join(self._raw)
        if self._begun:
            self._flush()
            if is_ended:
                loose += self._text[self._at :]
                self._at = len(self._text)
            if not was_cut and LETTER.search(loose):
                self.say(loose)
        elif loose.strip():
            self.say(loose)

    def accepts(self, name: str) -> bool:
        names = self.expected.names
        return name.isprintable() and (name in names if names is not None else bool(name))

    def knows(self, name: str) -> bool:
        """True for a tool of the request that may be called."""
        return self.accepts(name) and name in self.expected.schemas

    # Reading. Taken text is kept while it may become content; skipped text is markup.

    def is_over(self, *ends: str) -> Generator[None, None, bool]:
        """Returns True if one of `ends` comes next after white space, or if the text is at its end and the
        token limit has not cut it."""
        length = yield from self.blank()
        for end in ends:
            if (yield from self.sees(end, length)):
                return True
        return self._at + length == len(self._text) and not self._is_cut

    def check_cut(self, *marks: str) -> None:
        """Raises Ended if the token limit has cut the text before or within one of `marks`."""
        rest = self._text[self._at :]
        if self._is_cut and any(mark.startswith(rest) for mark in marks):
            raise Ended

    def ahead(self, length: int) -> Generator[None, None, str]:
        """Returns the next characters without taking them; fewer at the end of the text."""
        while len(self._text) - self._at < length and not self.is_ended:
            yield
        return self._text[self._at : self._at + length]

    def available(self) -> Generator[None, None, str]:
        """Returns the text that has arrived and is not taken, at least one character but at the end."""
        while self._at == len(self._text) and not self.is_ended:
            yield
        return self._text[self._at :]

    def more(self) -> Steps:
        """Waits for more text. Raises Ended if none follows."""
        if self.is_ended:
            raise Ended
        yield

    def error(self) -> Generator[None, None, Malformed]:
        """Returns Ended if no text follows, else Malformed."""
        return Malformed() if (yield from self.ahead(1)) else Ended()

    def sees(self, mark: str, offset: int = 0) -> Generator[None, None, bool]:
        """Returns True if `mark` comes next, after `offset` characters."""
        while True:
            start = self._at + offset
            text = self._text[start : start + len(mark)]
            if text == mark:
                return True
            if self.is_ended or not mark.startswith(text):
                return False
            yield

    def blank(self) -> Generator[None, None, int]:
        """Returns the length of the white space that comes next."""
        length = 0
        while True:
            while (at := self._at + length) < len(self._text) and self._text[at] in SPACE:
                length += 1
            if at < len(self._text) or self.is_ended:
                return length
            yield

    def take(self, text: str, mended: str | None = None) -> None:
        """Moves past `text`, which must come next. Arguments get `mended` in its place if that is given."""
        self._at += len(text)
        if self.copies:
            self._arguments.append(text if mended is None else mended)
        if not self.copies or self._is_whole or not self._begun:
            self._raw.append(text)

    def num_taken(self) -> int:
        return len(self._raw)

    def taken_since(self, number: int) -> str:
        """Returns the text that was taken since `num_taken` was this, of a call that is not recognized."""
        return "".join(self._raw[number:])

    def next(self) -> Generator[None, None, str]:
        """Returns the next character that is not white space, without taking it."""
        while (char := (yield from self.ahead(1))) in SPACE:
            if not char:
                raise Ended
            self.take(char)
        return char

    def expect(self, chars: str) -> Generator[None, None, str]:
        """Takes and returns the next character that is not white space."""
        char = yield from self.next()
        if char not in chars:
            raise Malformed
        self.take(char)
        return char

    def one_of(self, *marks: str) -> Generator[None, None, str]:
        """Takes the next of `marks` after white space. Returns "" for another text, which is not taken."""
        if length := (yield from self.blank()):
            self.take(self._text[self._at : self._at + length])
        for mark in marks:
            if (yield from self.sees(mark)):
                self.take(mark)
                return mark
        return ""

    def here(self, pattern: re.Pattern[str]) -> str:
        """Returns the text that has arrived and matches the pattern of a repeated character."""
        found = pattern.match(self._text, self._at)
        return found[0] if found else ""

    def match(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Returns the text that comes next and matches the pattern of a repeated character."""
        while True:
            text = self.here(pattern)
            if self._at + len(text) < len(self._text) or self.is_ended:
                return text
            yield

    def matching(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Takes and returns the text that comes next and matches the pattern of a repeated character."""
        text = yield from self.match(pattern)
        self.take(text)
        return text

    def one_line_break(self) -> Steps:
        """Takes the line break that comes next, if one does."""
        for text in ("\r\n", "\n"):
            if (yield from self.sees(text)):
                self.take(text)
                return

    def expect_mark(self, mark: str) -> Steps:
        if not (yield from self.one_of(mark)):
            raise Ended if self.is_ended and mark.startswith(self._text[self._at :]) else Malformed

    def up_to(self, *marks: str) -> Generator[None, None, tuple[str, str]]:
        """Takes the text before the first of `marks`, and the mark; returns both. Raises Malformed for a
        text of more than MAX_NAME."""
        patterns = marks_of(*marks)
        while True:
            found = patterns.find(self._text, self._at)
            text = self._text[self._at : found.start() if found else None]
            if len(text) - (0 if found else patterns.longest) > MAX_NAME:
                raise Malformed
            if found:
                self.take(text)
                self.take(found[0])
                return text, found[0]
            yield from self.more()

    def skip(self, chars: str) -> Steps:
        while (char := (yield from self.ahead(1))) and char in chars:
            self._at += 1

    def skip_mark(self, mark: str) -> None:
        """Moves past a mark, which must come next."""
        self._at += len(mark)

    def text_until(self, *marks: str, most: int | None = None) -> Generator[None, None, tuple[str, str]]:
        """Moves past the text before the first of `marks`, and the mark; returns both. The mark is "" if the
        text ended before it, or if `most` characters did not have it."""
        patterns, pieces, length = marks_of(*marks), list[str](), 0
        while True:
            rest = self._text[self._at :]
            found = patterns.find(rest)
            begun = None if found or self.is_ended else patterns.begun(rest)
            piece = rest[: found.start()] if found else rest[: begun.start()] if begun else rest
            is_long = most is not None and length + len(piece) > most
            if is_long and most is not None:
                piece = piece[: most - length]
            pieces.append(piece)
            length += len(piece)
            self._at += len(piece)
            if is_long or (found is None and self.is_ended):
                return "".join(pieces), ""
            if found:
                self._at += len(found[0])
                return "".join(pieces), found[0]
            yield

    def put_back(self, text: str) -> None:
        """Lets `text` come next again, once the answer has ended."""
        self._text, self._at = text + self._text[self._at :], 0

    def prose(self, marks: Marks, reasoning: bool = False) -> Generator[None, None, tuple[str, str]]:
        """Emits text up to the first of `marks`, and moves past the mark. Returns the white space before it,
        which is not emitted if the marks trim text, and the mark, "" at the end of the text."""
        while True:
            rest = self._text[self._at :]
            if found := marks.find(rest):
                solid = marks.trimmed(rest[: found.start()])
                self.say(solid, reasoning)
                self._at += found.end()
                return rest[len(solid) : found.start()], found[0]
            if self.is_ended:
                self._at = len(self._text)
                self.say(marks.trimmed(rest) if reasoning or self.index >= 0 else rest, reasoning)
                return "", ""
            begun = marks.begun(rest, max(0, len(rest) - marks.longest))
            solid = marks.trimmed(rest[: begun.start()] if begun else rest)
            self.say(solid, reasoning)
            self._at += len(solid)
            if self._at == len(self._text) and not self.separator:
                self._stirs, self._is_reasoning = marks.stirs, reasoning
            yield


def _returned(steps: Generator[None, None, Any]) -> list[Any]:
    """Runs steps that do not pause, as the text has ended; returns what they return."""
    try:
        next(steps)
    except StopIteration as stop:
        return [stop.value]
    raise AssertionError("a text that has ended was waited for")
