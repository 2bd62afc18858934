"""Llama 3: {"name": ..., "parameters": {...}}; ... at the start of the answer, or after <|python_tag|>.
Without the mark a call must name one of the tools, as it has no other difference from an answer in JSON."""

from __future__ import annotations

from shoal.text.reading.call_syntax import bare_json, json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_call
from shoal.text.reading.marks import SPACE
from shoal.text.reading.reader import Reader, Steps


class Llama3Json(ChatFormat):
    name = "llama3_json"
    signs = (("<|python_tag|>",), ("ipython",))
    openings = ("<|python_tag|>",)
    json_call = JsonCall("", "", separator="; ", arguments="parameters")
    syntaxes = (json_syntax("", "", "; ", key="parameters"),)
    bare = bare_json("", "parameters")

    def calls(self, reader: Reader, mark: str) -> Steps:
        while True:
            yield from read_call(reader, is_known=not mark, is_strict=not mark)
            yield from reader.skip(SPACE + ";")
            if (yield from reader.ahead(1)) != "{":
                return

    def bare_calls(self, reader: Reader) -> Steps:
        yield from reader.read_bare_calls("{")
