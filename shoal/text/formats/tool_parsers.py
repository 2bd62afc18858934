"""Finds tool calls in a model's text while it arrives.

A call is recognized when its name is known and its arguments begin; until then its text is held back, and
becomes content if it turns out to be text. After that the arguments stream. The result depends only on the
text, never on its pieces: the parsers are sequential code that pauses (a generator's `yield`) at the end of
the available text. Only a malformed call is read differently if the answer arrives as a whole.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Protocol

SPACE = " \t\r\n"
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # unescaped characters of a string
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
WORD = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_DEPTH = 64  # arguments with deeper nesting count as malformed

Steps = Generator[None, None, None]


@dataclass(slots=True)
class CallDelta:
    """A new part of call number `index`. Its id and name come once; its arguments, a JSON text, in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str
    reasoning: bool = False


Part = TextDelta | CallDelta


class Parser(Protocol):
    """Reads an answer's text as it arrives, and returns its parts in order."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Ends the text, and returns the parts that were held back."""
        ...


class Malformed(Exception):
    """Raised for an invalid character, or for text that ends within a value."""


class Ended(Malformed):
    """Raised for text that ends within a value. The rest is an incomplete escape or number without use."""


class CallReader:
    """Base of parsers: the available text, a strict JSON reader, and the output. `_run` of a subclass has the
    grammar of the text.

    Arguments are always the beginning of a JSON object, as clients parse them while they arrive: malformed
    ones end at the error, and the rest is content. Only bare control characters in strings are escaped, which
    models write for line breaks. If an answer is read as a whole, the client has not seen the beginning of a
    malformed call, so all of it is content, as in vLLM.
    """

    def __init__(self, is_whole: bool = False) -> None:
        """is_whole: the whole text arrives by one push."""
        self._is_whole = is_whole
        self._num_before = 0  # parts before the current call
        self._is_complete = False  # the last call was read completely
        self._text, self._at, self._is_ended = "", 0, False
        self._raw: list[str] = []  # text of a call that may turn out to be content
        self._arguments: list[str] = []  # arguments of the current call, not emitted yet
        self._inside = False  # the read text belongs to the arguments
        self._begun = False  # the current call is recognized
        self._index = -1  # the number of the last recognized call
        self._parts: list[Part] = []
        self._steps = self._run()

    def push(self, text: str) -> list[Part]:
        self._text, self._at = self._text[self._at :] + text, 0
        return self._advance()

    def finish(self) -> list[Part]:
        self._is_ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        self._give_arguments()
        parts, self._parts = self._parts, []
        return parts

    def _run(self) -> Steps:
        raise NotImplementedError

    # Output

    def _begin(self, name: str) -> None:
        self._index += 1
        self._begun, self._num_before = True, len(self._parts)
        self._parts.append(CallDelta(self._index, _new_id(), name))

    def _give_arguments(self) -> None:
        if not self._begun or not self._arguments:
            return
        if not self._parts or not isinstance(self._parts[-1], CallDelta):
            self._parts.append(CallDelta(self._index))
        self._parts[-1].arguments += "".join(self._arguments)  # type: ignore[union-attr]
        self._arguments.clear()

    def _give_content(self, text: str) -> None:
        if text and self._parts and isinstance(self._parts[-1], TextDelta):
            self._parts[-1].text += text
        elif text:
            self._parts.append(TextDelta(text))

    def _give_up(self, markup: str, error: Malformed) -> None:
        """Ends a call that turned out to be text, or that ends early. `markup`: the text skipped before
        it."""
        self._inside = False
        if self._begun and isinstance(error, Ended):
            self._at = len(self._text)
        elif self._begun and self._is_whole and not self._is_complete:
            del self._parts[self._num_before :]
            self._index, self._begun = self._index - 1, False
            self._arguments.clear()
        if self._begun:
            self._give_arguments()
        else:
            self._give_content(markup + "".join(self._raw))

    # Reading. Taken text is kept, as it may become content; skipped text is markup.

    def _ahead(self, length: int) -> Generator[None, None, str]:
        """Returns the next characters without taking them; fewer at the end of the text."""
        while len(self._text) - self._at < length and not self._is_ended:
            yield
        return self._text[self._at : self._at + length]

    def _take(self, text: str, mended: str | None = None) -> None:
        """Moves past `text`, which must come next. Arguments get `mended` in its place if that is given."""
        self._at += len(text)
        if not self._begun or self._is_whole:
            self._raw.append(text)
        if self._inside:
            self._arguments.append(mended or text)

    def _next(self) -> Generator[None, None, str]:
        """Returns the next character that is not white space, without taking it."""
        while (char := (yield from self._ahead(1))) in SPACE:
            if not char:
                raise Ended
            self._take(char)
        return char

    def _expect(self, chars: str) -> Generator[None, None, str]:
        char = yield from self._next()
        if char not in chars:
            raise Malformed
        self._take(char)
        return char

    def _skip(self, chars: str) -> Steps:
        while (char := (yield from self._ahead(1))) and char in chars:
            self._at += 1

    # JSON

    def _string(self) -> Generator[None, None, str]:
        """Reads a JSON string and returns its value."""
        yield from self._expect('"')
        parts: list[str] = []
        while (char := (yield from self._ahead(1))) != '"':
            if not char:
                raise Ended
            if char == "\\":
                yield from self._escape(parts)
            elif char < " ":
                parts.append(json.dumps(char)[1:-1])
                self._take(char, mended=parts[-1])
            else:
                parts.append(PLAIN.match(self._text, self._at)[0])  # type: ignore[index]
                self._take(parts[-1])
        self._take('"')
        return json.loads(f'"{"".join(parts)}"')

    def _escape(self, parts: list[str]) -> Steps:
        text = yield from self._ahead(2)
        if text == "\\u":
            text = yield from self._ahead(6)
        if not ESCAPE.fullmatch(text):
            raise Ended if len(text) < (6 if text[1:2] == "u" else 2) else Malformed
        parts.append(text)
        self._take(text)

    def _word(self) -> Steps:
        """Reads a number, true, false or null."""
        while (
            (found := WORD.match(self._text, self._at))
            and found.end() == len(self._text)
            and not self._is_ended
        ):
            yield
        word = found[0] if found else ""
        if word not in ("true", "false", "null") and not NUMBER.fullmatch(word):
            raise Malformed if self._text[self._at + len(word) :] else Ended
        self._take(word)

    def _value(self, depth: int = 0) -> Steps:
        char = yield from self._next()
        if depth > MAX_DEPTH:
            raise Malformed
        if char == '"':
            yield from self._string()
        elif char not in "{[":
            yield from self._word()
        else:
            self._take(char)
            end = "}" if char == "{" else "]"
            if (yield from self._next()) == end:
                self._take(end)
                return
            while True:
                if char == "{":
                    yield from self._string()
                    yield from self._expect(":")
                yield from self._value(depth + 1)
                if (yield from self._expect("," + end)) == end:
                    return

    # Calls

    def _call(self, names: Collection[str] | None = None, is_strict: bool = False) -> Steps:
        """Reads {"name": ..., "arguments": {...}}. names: only calls of these count. is_strict: without other
        keys.

        Raises Malformed; `_begun` is True if the call was recognized before.
        """
        self._give_arguments()  # without the state of the call before
        self._begun, self._inside, self._is_complete, name, has_arguments = False, False, False, "", False
        self._raw.clear()
        self._arguments.clear()
        yield from self._expect("{")
        while True:
            key = yield from self._string()
            yield from self._expect(":")
            if key == "name" and not name:
                name = yield from self._string()
                if not name.isprintable() or (name not in names if names is not None else not name):
                    raise Malformed
                if has_arguments:
                    self._begin(name)
            elif key in ("arguments", "parameters") and not has_arguments:
                yield from self._call_arguments(name)
                has_arguments = True
            elif not is_strict or key in ("type", "id"):
                yield from self._value()
            else:
                raise Malformed
            if (yield from self._expect(",}")) == "}":
                break
        if not name:
            raise Malformed
        if not self._begun:
            self._begin(name)
            self._arguments.append("{}")
        self._give_arguments()
        self._is_complete = True

    def _call_arguments(self, name: str) -> Steps:
        if (yield from self._next()) == "{":
            if name:
                self._begin(name)
            self._inside = True
            yield from self._value()
            self._inside = False
            return
        # Some models write the object as text, or null for an empty one.
        start = len(self._raw)
        yield from self._value()
        try:
            value = json.loads(json.loads("".join(self._raw[start:]), strict=False) or "{}")
        except (TypeError, ValueError):
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        self._arguments.append(json.dumps(value))
        if name:
            self._begin(name)

    def _list_of_calls(
        self, markup: str, names: Collection[str] | None = None, is_strict: bool = False
    ) -> Steps:
        """Reads [{"name": ...}, ...]. `markup`: the text skipped before it."""
        self._give_arguments()
        self._raw.clear()
        self._begun = self._is_complete = False
        try:
            yield from self._expect("[")
            markup += "".join(self._raw)
            while True:
                yield from self._call(names, is_strict)
                markup = ""
                if (yield from self._expect(",]")) == "]":
                    return
        except Malformed as error:
            self._give_up(markup, error)


class MarkedCalls(CallReader):
    """Reads text in which each opening mark begins one call or several; drops white space around them.
    `_calls` of a subclass reads the text after a mark."""

    openings: tuple[str, ...]
    closing = ""  # the optional mark after a call; another mark stays text
    bare = ""  # the character with which calls without a mark may begin an answer

    def __init__(self, names: Collection[str] | None = None, is_whole: bool = False) -> None:
        """`names`: calls of other tools count as text."""
        self._names = names
        self._unclosed = False  # the closing mark of a call is expected
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
        """Reads calls that follow one another. `markup`: the text skipped before the first."""
        raise NotImplementedError

    def _prose(self) -> Generator[None, None, str | None]:
        """Emits content up to an opening mark and skips the mark. Returns the skipped text, or None at the
        end of the text."""
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


class TaggedCalls(MarkedCalls):
    """Reads text in which each call is a JSON object between an opening and a closing tag."""

    def __init__(
        self,
        opening: str | tuple[str, ...],
        closing: str,
        names: Collection[str] | None = None,
        is_whole: bool = False,
    ) -> None:
        """openings: spellings of the opening tag. `names`: see MarkedCalls."""
        self.openings = (opening,) if isinstance(opening, str) else opening
        self.closing = closing
        super().__init__(names, is_whole)

    def _calls(self, markup: str) -> Steps:
        try:
            yield from self._call(self._names)
        except Malformed as error:
            self._give_up(markup, error)
            self._unclosed = self._begun
            return
        self._unclosed = True
        yield from self._skip(SPACE + "}")  # one brace too many is a common error


class ListedCalls(CallReader):
    """Reads an answer of the form [{"name": ..., "parameters": {...}}, ...], which the grammar of tool_choice
    "required" enforces."""

    def _run(self) -> Steps:
        yield from self._list_of_calls("")
        if self._index >= 0:
            yield from self._skip(SPACE)
        while True:
            rest = self._text[self._at :]
            solid = rest.rstrip(SPACE) if self._index >= 0 else rest
            self._give_content(solid)
            self._at += len(solid)
            if self._is_ended:
                return
            yield


class NamedCall:
    """Reads an answer with only the arguments of one tool, which the grammar of a named tool_choice
    enforces."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        begun, self._begun = self._begun, True
        return [CallDelta(0, arguments=text) if begun else CallDelta(0, _new_id(), self._name, text)]

    def finish(self) -> list[Part]:
        return []


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def length_of_start(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
