"""ChatFormat: how one family of models writes its answers. A family is a subclass in a file of its own, and
states what differs; the machine is reader.py."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass

from shoal.text.reading.call_syntax import BareCalls, CallSyntax
from shoal.text.reading.marks import SPACE, marks_of
from shoal.text.reading.reader import Reader, Steps
from shoal.text.reading.thoughts import Start, Thoughts


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call as JSON, {"name": ..., arguments: {...}}, and the texts around it."""

    begin: str
    end: str
    separator: str = "\n"
    arguments: str = "arguments"


class ChatFormat:
    """The form of a family's answers: reasoning, words and calls.

    A class has the facts about its family, and `calls` reads what follows one of `openings`. `json_call` is
    a call in JSON as a prompt shows it. Grammars make calls in one of `syntaxes`, which `calls` reads too.
    """

    name: str  # vLLM's name of its parser of calls
    signs: tuple[tuple[str, ...], ...] = ()  # see is_of
    openings: tuple[str, ...] = ()  # marks that begin calls
    closing: str = ""  # the optional mark after calls; it is text where no call precedes it
    silent: tuple[str, ...] = ()  # the marks before and after words that are not part of them
    thoughts: Thoughts | None = None  # None: the chat template has the marks around reasoning
    json_call: JsonCall | None = None
    syntaxes: tuple[CallSyntax, ...] = ()
    bare: BareCalls | None = None  # the calls that `bare_calls` reads

    def is_of(self, template: str) -> bool:
        """Returns True for a chat template with all texts of one of `signs`."""
        return any(all(sign in template for sign in signs) for signs in self.signs)

    def calls(self, reader: Reader, mark: str) -> Steps:
        """Reads the calls after an opening mark, or "" for bare ones. Raises Malformed."""
        raise NotImplementedError

    def bare_calls(self, reader: Reader) -> Steps:
        """Reads the calls with which an answer begins without a mark, if the family has such calls."""
        yield from ()

    def new_id(self) -> str:
        """Returns an id for a call, unique in all conversations."""
        return f"call_{uuid.uuid4().hex}"

    def answer(self, reader: Reader) -> Steps:
        """Reads an answer: reasoning first, then words and calls in any order."""
        expected = reader.expected
        thoughts, openings = expected.thoughts, self.openings if expected.takes_calls else ()
        closes = expected.start is Start.AFTER  # a further end of reasoning is dropped
        if thoughts is not None and (yield from self._begins_thinking(reader, thoughts, expected.start)):
            yield from self._think(reader, thoughts, openings)
            closes = True
        if expected.takes_calls:
            yield from self.bare_calls(reader)
        is_first, num_inner = True, 0  # inner: a first mark of `silent` within words, such as a tag of XML
        while True:
            if is_first and self.silent:
                yield from self._skip_silent(reader)
            is_first = True
            marks = [*openings, *self.silent]
            if reader.is_closing and self.closing:
                marks.append(self.closing)
            if thoughts is not None:
                marks += [thoughts.open] if thoughts.anywhere else []
                marks += [thoughts.close] if closes else []
            trims = expected.takes_calls or (thoughts is not None and thoughts.anywhere)
            gap, mark = yield from reader.prose(marks_of(*marks, trims=trims))
            if not mark:
                return
            if mark in openings:
                yield from reader.read_calls(gap, mark)
            elif thoughts is not None and mark == thoughts.open:
                yield from self._think(reader, thoughts, openings)
                closes = True
            elif mark in self.silent:
                is_first = mark != self.silent[0] and not num_inner
                if is_first:
                    yield from reader.skip(SPACE)
                else:
                    num_inner += 1 if mark == self.silent[0] else -1
                    reader.say(gap + mark)
            elif mark == self.closing:
                reader.is_closing = False
                yield from reader.skip(SPACE)
            else:
                reader.say(gap)

    def _skip_silent(self, reader: Reader) -> Steps:
        """Moves past the mark before words, if it comes next."""
        length = yield from reader.blank()
        if (yield from reader.sees(self.silent[0], length)):
            yield from reader.skip(SPACE)
            reader.skip_mark(self.silent[0])
            yield from reader.skip(SPACE)

    def _begins_thinking(
        self, reader: Reader, thoughts: Thoughts, start: Start
    ) -> Generator[None, None, bool]:
        """Returns True if reasoning comes next, and moves to it."""
        if start is Start.AMID:
            return True
        length = yield from reader.blank()
        is_open = yield from reader.sees(thoughts.open, length)
        if is_open or start is Start.INSIDE:
            yield from reader.skip(SPACE)
            if is_open:
                reader.skip_mark(thoughts.open)
            yield from reader.skip(SPACE)
            return True
        return False

    def _think(self, reader: Reader, thoughts: Thoughts, openings: tuple[str, ...]) -> Steps:
        """Reads reasoning and its closing mark. What looks like a call is held back until it is known
        whether the reasoning is closed later: models quote calls in it, and also forget to close it."""
        gap, mark = yield from reader.prose(marks_of(thoughts.close, *openings), reasoning=True)
        if mark and mark != thoughts.close:
            held, close = yield from reader.text_until(thoughts.close)
            if close:
                reader.say((gap + mark + held).rstrip(SPACE), reasoning=True)
            else:
                yield from self._call_at_the_end(reader, gap + mark + held, openings)
        yield from reader.skip(SPACE)

    def _call_at_the_end(self, reader: Reader, held: str, openings: tuple[str, ...]) -> Steps:
        """Reads the rest of an answer whose reasoning is not closed: calls that end it are calls."""
        reader.put_back(held)
        marks = marks_of(*openings)
        while True:
            gap, mark = yield from reader.prose(marks, reasoning=True)
            if not mark or reader.read_calls_alone(mark, self.closing, openings):
                return
            reader.say(gap + mark, reasoning=True)


class PlainFormat(ChatFormat):
    """Answers without calls."""

    name = "none"
