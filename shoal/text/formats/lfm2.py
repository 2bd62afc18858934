"""LFM2 and LFM2.5: <|tool_call_start|>[name(key='text'), ...]<|tool_call_end|>"""

from __future__ import annotations

from shoal.text.formats import pythonic
from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.reader import Reader, Steps


class Lfm2(ChatFormat):
    name = "lfm2"
    signs = (("<|tool_call_start|>",), ("<|tool_list_start|>",))
    openings = ("<|tool_call_start|>",)
    closing = "<|tool_call_end|>"
    syntaxes = (
        CallSyntax(
            "", "(", ")", "<|tool_call_start|>[", "]<|tool_call_end|>", ", ", argument=pythonic.ARGUMENTS
        ),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from pythonic.read_calls(reader, is_known=False)
