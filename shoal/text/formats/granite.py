"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]. Without the mark, an answer that begins
with such a list counts if it names tools of the request. Phi-4-mini's official template has the same mark
and <|/tool_call|> at the end."""

from __future__ import annotations

from shoal.text.reading.call_syntax import GAP, bare_json, json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps


class Granite(ChatFormat):
    name = "granite"
    signs = (("<|tool_call|>",),)
    openings = ("<|tool_call|>", "<tool_call>")
    closing = "<|/tool_call|>"
    silent = ("<response>", "</response>")  # Granite 3.3 with thinking on
    json_call = JsonCall("<|tool_call|>[", "]")
    syntaxes = (json_syntax("<|tool_call|>[", "]", ", "),)
    bare = bare_json(r"\[" + GAP, "arguments")

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader, is_known=not mark, is_strict=not mark)

    def bare_calls(self, reader: Reader) -> Steps:
        yield from reader.read_bare_calls("[")
