"""Mistral, Ministral, Magistral, Devstral. Up to version 7 of the tokenizer a list:
[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]; from version 11 on
[TOOL_CALLS]name[ARGS]{...} for each call, sometimes with [CALL_ID]... after the name or without [ARGS].
Their templates want ids of nine letters and digits."""

from __future__ import annotations

import re
import secrets
import string

from shoal.text.reading.call_syntax import CallSyntax, json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_call, read_list, read_object
from shoal.text.reading.reader import Malformed, Reader, Steps

WORD = re.compile(r"[^\[{ \t\r\n]*")
SIGNS = string.ascii_letters + string.digits


class Mistral(ChatFormat):
    name = "mistral"
    signs = (("[TOOL_CALLS]",),)
    openings = ("[TOOL_CALLS]",)
    json_call = JsonCall("[TOOL_CALLS][", "]")
    syntaxes = (CallSyntax("[TOOL_CALLS]", "[ARGS]", ""), json_syntax("[TOOL_CALLS][", "]", ", "))

    def calls(self, reader: Reader, mark: str) -> Steps:
        first = yield from reader.next()
        if first == "[":
            yield from read_list(reader)
        elif first == "{":
            yield from read_call(reader)
        else:
            name = yield from reader.matching(WORD)
            if not reader.accepts(name):
                raise Malformed
            if (yield from reader.one_of("[CALL_ID]")):
                yield from reader.matching(WORD)
            yield from reader.one_of("[ARGS]")
            yield from read_object(reader, name)

    def new_id(self) -> str:
        return "".join(secrets.choice(SIGNS) for _ in range(9))
