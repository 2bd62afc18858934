"""Hunyuan A13B: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, and words within
<answer>. Hunyuan 3: <tool_calls><tool_call>name<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>...
</tool_call>...</tool_calls>."""

from __future__ import annotations

from shoal.text.formats.chat_format import ChatFormat, JsonCall
from shoal.text.formats.glm45 import CALL, END_OF_CALL, KEY, Glm45
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps

CALLS, END_OF_CALLS = "<tool_calls>", "</tool_calls>"


class HunyuanA13B(ChatFormat):
    name = "hunyuan_a13b"
    signs = ((CALLS,),)
    openings = (CALLS,)
    closing = END_OF_CALLS
    silent = ("<answer>", "</answer>")
    json_call = JsonCall("<tool_calls>[", "]</tool_calls>")

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader)


class HyV3(Glm45):
    name = "hy_v3"
    signs = (("<tool_sep>",),)
    openings = (CALLS, CALL)
    closing = END_OF_CALLS

    def calls(self, reader: Reader, mark: str) -> Steps:
        if mark == CALLS:
            yield from reader.expect_mark(CALL)
        while True:
            yield from self.call(reader, "<tool_sep>", KEY, "\n", END_OF_CALL)
            if not (yield from reader.one_of(CALL)):
                return
            reader.next_call()
