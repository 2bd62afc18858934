"""Answers of several messages, each with a header: <|start|>assistant ...<|message|>text<|end|>. The header
says whether the text is reasoning, words or a call. The prompt ends with <|start|>assistant, so an answer
begins with the rest of a header."""

from __future__ import annotations

from collections.abc import Generator

from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.marks import marks_of
from shoal.text.reading.reader import Reader, Steps
from shoal.text.reading.thoughts import Start

START, MESSAGE = "<|start|>", "<|message|>"
NEXT = "<|start|>assistant"  # the beginning of a further message's header
MAX_HEADER = 256  # characters; the mark after a longer header is missing


class Messages(ChatFormat):
    ends: tuple[str, ...]  # marks that end a message
    heads: tuple[str, ...]  # beginnings of a header without <|start|>
    # Regexes of the rest of a header, after NEXT. call_head ends before the arguments; {name} is the tool.
    thoughts_head: str
    words_head: str
    call_head: str

    def is_thought(self, header: str) -> bool:
        raise NotImplementedError

    def tool_of(self, header: str) -> str:
        """Returns the tool if the message is the arguments of a call, else ""."""
        return ""

    def words_of(self, header: str) -> str:
        """Returns the text of a header that is part of the message, as the mark between them is missing."""
        raise NotImplementedError

    def answer(self, reader: Reader) -> Steps:
        thinks = reader.expected.start in (Start.INSIDE, Start.AMID)
        if not thinks and (yield from self._has_header(reader)):
            mark = START
        else:
            mark = yield from self._body(reader, thinks)
        said: set[bool] = set()  # kinds of text that were said
        while mark:
            if mark != START and not (yield from reader.one_of(START)):
                if (yield from reader.is_over()):
                    return
                if not (yield from self._has_header(reader)):
                    mark = yield from self._body(reader, False)
                    continue
            header, mark = yield from reader.text_until(MESSAGE, *self.ends, START, most=MAX_HEADER)
            thinks = self.is_thought(header) and reader.expected.thoughts is not None
            reader.separator = "\n" if thinks in said else ""
            if mark == MESSAGE and self.tool_of(header) and reader.expected.takes_calls:
                yield from reader.read_calls("", header + MESSAGE)
            elif mark != MESSAGE:
                reader.say(self.words_of(header), thinks)
            if mark in ("", MESSAGE):
                mark = yield from self._body(reader, thinks)
            if not reader.separator:
                said.add(thinks)
            reader.separator = ""

    def _has_header(self, reader: Reader) -> Generator[None, None, bool]:
        length = yield from reader.blank()
        for head in (START, MESSAGE, *self.heads):
            if (yield from reader.sees(head, length)):
                return True
        return False

    def _body(self, reader: Reader, thinks: bool) -> Generator[None, None, str]:
        """Reads the text of a message. Returns the mark after it."""
        openings = self.openings if reader.expected.takes_calls and not thinks else ()
        while True:
            closing = [self.closing] if reader.is_closing and self.closing else []
            marks = marks_of(*self.ends, START, *openings, *closing)
            gap, mark = yield from reader.prose(marks, reasoning=thinks)
            if mark in openings:
                yield from reader.read_calls(gap, mark)
            elif mark in closing:
                reader.is_closing = False
            else:
                return mark
