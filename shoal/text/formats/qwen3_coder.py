"""Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3, in XML:
<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>

A value is the text between its tags without one line break on each side, and the tool's schema has its type.
Only </parameter> closes it. The outer tag may be missing, and JSON within it is read as in Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator

from shoal.text.formats.hermes import CLOSING, OPENING
from shoal.text.formats.tool_format import Schemas, ToolFormat
from shoal.text.formats.tool_parsers import SPACE, Ended, Malformed, Steps, TaggedCalls, length_of_start
from shoal.text.formats.typed_values import is_text, json_of, kinds_of

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"
MAX_START = 32  # characters of a value that are enough to recognize a string
MAX_NAME = 256  # characters; longer names are text


class Qwen3CoderCalls(TaggedCalls):
    def __init__(self, schemas: Schemas, names: Collection[str] | None, is_whole: bool) -> None:
        self._schemas = schemas
        super().__init__((OPENING, FUNCTION), CLOSING, names, is_whole)

    def _calls(self, markup: str) -> Steps:
        self._give_arguments()
        self._raw.clear()
        self._begun = self._is_complete = False
        has_mark = not markup.endswith(FUNCTION)
        is_sure = has_mark or self._unclosed
        try:
            if has_mark:
                while (yield from self._one_of(self.openings[0])):  # some models write it twice
                    pass
                if (yield from self._next()) == "{":
                    yield from super()._calls(markup + "".join(self._raw))
                    return
                yield from self._tag(FUNCTION)
            yield from self._function(is_sure)
        except Malformed as error:
            self._give_up(markup, error)
        self._unclosed = self._begun

    def _function(self, is_sure: bool) -> Steps:
        """Reads a call after <function=. Without `is_sure`, as no <tool_call> precedes it, it counts if it
        names a tool."""
        name = yield from self._name()
        names = self._schemas if self._names is None and not is_sure else self._names
        if names is not None and name not in names:
            raise Malformed
        num_values = 0
        while (tag := (yield from self._one_of(PARAMETER, END_OF_FUNCTION))) == PARAMETER:
            key = yield from self._name()
            if not num_values:
                self._begin(name)
            self._arguments.append(f"{', ' if num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._parameter(kinds_of(self._schemas.get(name, {}), key))
            num_values += 1
        if not num_values:
            if not tag and (yield from self._ahead(len(self.closing))) != self.closing:
                raise Malformed
            self._begin(name)
        self._arguments.append("}" if num_values else "{}")
        self._give_arguments()
        self._is_complete = True
        yield from self._skip(SPACE)

    def _parameter(self, kinds: frozenset[str]) -> Steps:
        """Reads a value and its closing tag. It streams once it must be a string; until then its type is
        open."""
        yield from self._line_break()
        value: list[str] = []
        start, streams = "", False
        while True:
            rest = self._text[self._at :]
            end = rest.find(END_OF_PARAMETER)
            if end >= 0:
                piece = rest[:end].removesuffix("\n").removesuffix("\r")
            else:
                held = max(length_of_start(rest, line + END_OF_PARAMETER) for line in ("", "\n", "\r\n"))
                piece = rest[: len(rest) - held]
            self._take_raw(rest[: end + len(END_OF_PARAMETER)] if end >= 0 else piece)
            value.append(piece)
            start += piece[: MAX_START - len(start)]
            if not streams and is_text(start, kinds):
                streams = True
                self._arguments.append('"')
            if streams and (text := "".join(value)):
                self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
                value.clear()
            if end >= 0:
                self._arguments.append('"' if streams else json_of("".join(value), kinds))
                return
            if self._is_ended:
                raise Ended
            yield

    # Tags

    def _line_break(self) -> Steps:
        if (yield from self._ahead(2)) == "\r\n":
            self._take_raw("\r\n")
        elif (yield from self._ahead(1)) == "\n":
            self._take_raw("\n")

    def _name(self) -> Generator[None, None, str]:
        """Takes a name and the > after it."""
        name = ""
        while (char := (yield from self._ahead(1))) != ">":
            if not char or char in "<\n" or len(name) == MAX_NAME:
                raise Malformed
            self._take_raw(char)
            name += char
        self._take_raw(">")
        if not (name := name.strip().strip('"')):
            raise Malformed
        return name

    def _tag(self, tag: str) -> Steps:
        if (yield from self._one_of(tag)) != tag:
            raise Malformed

    def _one_of(self, *tags: str) -> Generator[None, None, str]:
        """Takes the next of `tags` after white space. Returns "" for another text, which is not taken."""
        while (char := (yield from self._ahead(1))) and char in SPACE:
            self._take_raw(char)
        for tag in tags:
            length = 1
            while (seen := (yield from self._ahead(length))) == tag[:length] and length < len(tag):
                length += 1
            if seen == tag:
                self._take_raw(tag)
                return tag
        return ""

    def _take_raw(self, text: str) -> None:
        """Moves past `text`, which becomes content if the call turns out to be text."""
        self._at += len(text)
        if not self._begun or self._is_whole:
            self._raw.append(text)


FORMAT = ToolFormat(
    "qwen3_coder", lambda template: FUNCTION in template and PARAMETER in template, Qwen3CoderCalls
)
