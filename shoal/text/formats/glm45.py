"""GLM 4.5 to 5, and Laguna:
<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>, with line breaks or without. The
name ends at the first key, line break or end; values are taken whole."""

from __future__ import annotations

import re

from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.tagged_values import read_argument

NAME = re.compile(r"[\w.:-]+")  # other texts between the marks are words


def syntax_of(between: str) -> CallSyntax:
    """between: the line break between the parts of a call, or ""."""
    return CallSyntax(
        "<tool_call>",
        between,
        "</tool_call>",
        separator=between,
        argument=TaggedArgument(
            "<arg_key>", f"</arg_key>{between}<arg_value>", "</arg_value>", after=between
        ),
    )


class Glm45(ChatFormat):
    name = "glm45"
    signs: tuple[tuple[str, ...], ...] = (("<arg_key>",),)
    openings: tuple[str, ...] = ("<tool_call>",)
    syntaxes = (syntax_of("\n"), syntax_of(""))

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_call(reader)


def read_call(reader: Reader, suffix: str = "") -> Steps:
    """Reads a call after its opening tag. suffix: the end of each tag's name."""
    key_tag, end_of_call = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
    yield from reader.next()
    name, tag = yield from reader.up_to(f"<tool_sep{suffix}>", key_tag, "\n", end_of_call)
    if not NAME.fullmatch(name := name.strip()) or not reader.accepts(name):
        raise Malformed
    if tag not in (key_tag, end_of_call):
        tag = yield from reader.one_of(key_tag, end_of_call)
    has_begun = False
    while tag == key_tag:
        key, _ = yield from reader.up_to(f"</arg_key{suffix}>")
        yield from reader.expect_mark(f"<arg_value{suffix}>")
        if not has_begun:
            reader.begin(name)
            has_begun = True
        yield from read_argument(reader, name, key.strip(), f"</arg_value{suffix}>")
        tag = yield from reader.one_of(key_tag, end_of_call)
    if not tag:
        reader.check_cut(key_tag, end_of_call)
    if not has_begun:
        if not tag:
            raise Malformed
        reader.begin(name)
    reader.end_arguments()
