"""Kimi K2, K2 Thinking and K2.5:
<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
<|tool_call_end|>...<|tool_calls_section_end|>. The text before the arguments is the call's id, which the
model expects to see again."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import read_object
from shoal.text.reading.reader import Malformed, Reader, Steps

SECTION, CALL, END_OF_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"


class KimiK2(ChatFormat):
    name = "kimi_k2"
    signs = ((SECTION,),)
    openings = (SECTION, CALL)
    closing = "<|tool_calls_section_end|>"
    syntaxes = (
        CallSyntax(
            f"{CALL}functions.",
            ":{number}<|tool_call_argument_begin|>",
            END_OF_CALL,
            SECTION,
            "<|tool_calls_section_end|>",
        ),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        if mark == SECTION:
            yield from reader.expect_mark(CALL)
        while True:
            head, _ = yield from reader.up_to("<|tool_call_argument_begin|>")
            call_id = head.strip()
            name, _, _ = call_id.removeprefix("functions.").rpartition(":")
            if not reader.accepts(name):
                raise Malformed
            yield from read_object(reader, name, call_id, end=END_OF_CALL)
            yield from reader.one_of(END_OF_CALL)
            if not (yield from reader.one_of(CALL)):
                return
            reader.next_call()
