"""LFM2 and LFM2.5: <|tool_call_start|>[name(key='text'), ...]<|tool_call_end|>"""

from __future__ import annotations

from shoal.text.formats.pythonic import read_calls
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.reader import Reader, Steps


class Lfm2(ChatFormat):
    name = "lfm2"
    signs = (("<|tool_call_start|>",), ("<|tool_list_start|>",))
    openings = ("<|tool_call_start|>",)
    closing = "<|tool_call_end|>"

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_calls(reader, is_known=False)
