"""Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, MiMo and others:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>, blocks in a row."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax, json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_call, skip_rest
from shoal.text.reading.reader import Reader, Steps

HERMES_CALL = JsonCall("<tool_call>\n", "\n</tool_call>")


class Hermes(ChatFormat):
    name = "hermes"
    signs: tuple[tuple[str, ...], ...] = (("<tool_call>",),)
    openings: tuple[str, ...] = ("<tool_call>",)
    closing = "</tool_call>"
    json_call = HERMES_CALL
    syntaxes: tuple[CallSyntax, ...] = (
        json_syntax("", "", "\n", before="<tool_call>\n", after="\n</tool_call>"),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_call(reader)
        yield from skip_rest(reader)


class Ernie45(Hermes):
    """ERNIE 4.5's thinking models write words within <response>."""

    name = "ernie45"
    signs = (("<response>", "<tool_call>"),)
    silent = ("<response>", "</response>")
