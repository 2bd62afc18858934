"""Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3, MiMo and others:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>, blocks in a row."""

from __future__ import annotations

from typing import ClassVar

from shoal.text.formats.chat_format import ChatFormat, JsonCall
from shoal.text.formats.json_calls import read_call, skip_rest
from shoal.text.formats.reader import Reader, Steps


class Hermes(ChatFormat):
    name = "hermes"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<tool_call>",),)
    openings: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    closing = "</tool_call>"
    json_call = JsonCall("<tool_call>\n", "\n</tool_call>")

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_call(reader)
        yield from skip_rest(reader)
