"""Command R7B and Command A: <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>,
with marks around the words of an answer and around reasoning."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps


class CohereCommand(ChatFormat):
    name = "cohere_command3"
    signs = (("<|START_ACTION|>",),)
    openings = ("<|START_ACTION|>",)
    closing = "<|END_ACTION|>"
    silent = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    syntaxes = (
        CallSyntax(
            '{"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            "}",
            begin="<|START_ACTION|>[\n    ",
            end="\n]<|END_ACTION|>",
            separator=",\n    ",
        ),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader, name_key="tool_name")
