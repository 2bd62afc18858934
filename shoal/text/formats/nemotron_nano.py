"""Nemotron Nano v2: <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>. Nemotron 3 writes
Qwen3-Coder's calls."""

from __future__ import annotations

from shoal.text.reading.call_syntax import json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps


class NemotronNano(ChatFormat):
    name = "nemotron_json"
    signs = (("<TOOLCALL>",),)
    openings = ("<TOOLCALL>",)
    closing = "</TOOLCALL>"
    json_call = JsonCall("<TOOLCALL>[", "]</TOOLCALL>")
    syntaxes = (json_syntax("<TOOLCALL>[", "]</TOOLCALL>", ", "),)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader)
