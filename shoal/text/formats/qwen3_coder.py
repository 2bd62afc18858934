"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, in XML:
<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>

A value is the text between its tags without one line break on each side. The outer tag may be missing, and
JSON within it is read as in Hermes."""

from __future__ import annotations

from collections.abc import Generator

from shoal.text.formats.hermes import Hermes
from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.tagged_values import read_argument

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_FUNCTION, END_OF_PARAMETER = "</function>", "</parameter>"


class Qwen3Coder(Hermes):
    name = "qwen3_coder"
    signs: tuple[tuple[str, ...], ...] = ((FUNCTION, PARAMETER),)
    openings: tuple[str, ...] = ("<tool_call>", FUNCTION)
    trims_line = True  # a line break on each side of a value is not part of it
    syntaxes: tuple[CallSyntax, ...] = (
        CallSyntax(
            f"<tool_call>\n{FUNCTION}",
            ">\n",
            f"{END_OF_FUNCTION}\n</tool_call>",
            separator="\n",
            argument=TaggedArgument(PARAMETER, ">\n", END_OF_PARAMETER, lead="\n", after="\n"),
        ),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        is_known = False
        if mark == FUNCTION:
            is_known = not reader.is_closing  # as no <tool_call> precedes it
        else:
            while (yield from reader.one_of(self.openings[0])):  # some models write it twice
                pass
            if (yield from reader.next()) == "{":
                yield from super().calls(reader, mark)
                return
            yield from reader.expect_mark(FUNCTION)
        name = yield from _name(reader)
        if not (reader.knows if is_known else reader.accepts)(name):
            raise Malformed
        has_begun = False
        while tag := (yield from reader.one_of(PARAMETER, END_OF_FUNCTION)):
            if tag == END_OF_FUNCTION:
                break
            key = yield from _name(reader)
            if not has_begun:
                reader.begin(name)
                has_begun = True
            yield from read_argument(reader, name, key, END_OF_PARAMETER, trims_line=self.trims_line)
        if not tag:
            reader.check_cut(PARAMETER, END_OF_FUNCTION)
        if not has_begun:
            if not tag and not (yield from reader.sees(self.closing)):
                raise Malformed
            reader.begin(name)
        reader.end_arguments()


def _name(reader: Reader) -> Generator[None, None, str]:
    """Takes a name and the > after it."""
    name, end = yield from reader.up_to(">", "<", "\n")
    if end != ">" or not (name := name.strip().strip('"')):
        raise Malformed
    return name
