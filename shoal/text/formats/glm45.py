"""GLM 4.5 to 5, and Laguna:
<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>, with line breaks or without. The
name ends at the first key, line break or end; values are taken whole."""

from __future__ import annotations

import re

from shoal.text.formats.chat_format import ChatFormat
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.tagged_values import read_argument

CALL, END_OF_CALL, KEY = "<tool_call>", "</tool_call>", "<arg_key>"
NAME = re.compile(r"[\w.:-]+")  # other texts between the marks are words


class Glm45(ChatFormat):
    name = "glm45"
    signs: tuple[tuple[str, ...], ...] = ((KEY,),)
    openings: tuple[str, ...] = (CALL,)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from self.call(reader, KEY, "\n", END_OF_CALL)

    def call(self, reader: Reader, *ends: str) -> Steps:
        """Reads one call, whose name ends with one of `ends`."""
        yield from reader.next()
        name, tag = yield from reader.up_to(*ends)
        if not NAME.fullmatch(name := name.strip()) or not reader.accepts(name):
            raise Malformed
        if tag not in (KEY, END_OF_CALL):
            tag = yield from reader.one_of(KEY, END_OF_CALL)
        has_begun = False
        while tag == KEY:
            key, _ = yield from reader.up_to("</arg_key>")
            yield from reader.expect_mark("<arg_value>")
            if not has_begun:
                reader.begin(name)
                has_begun = True
            yield from read_argument(reader, name, key.strip(), "</arg_value>")
            tag = yield from reader.one_of(KEY, END_OF_CALL)
        if not tag:
            reader.check_cut(KEY, END_OF_CALL)
        if not has_begun:
            if not tag:
                raise Malformed
            reader.begin(name)
        reader.end_arguments()
