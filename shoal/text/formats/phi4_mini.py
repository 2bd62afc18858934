"""Phi-4-mini and FireFunction: functools[{"name": ..., "arguments": {...}}, ...]"""

from __future__ import annotations

from shoal.text.reading.call_syntax import json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps


class Phi4Mini(ChatFormat):
    name = "phi4_mini_json"
    signs = (("functools",),)
    openings = ("functools",)
    json_call = JsonCall("functools[", "]")
    syntaxes = (json_syntax("functools[", "]", ", "),)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader)
