"""Calls as Hermes writes them, and Qwen 2.5 and 3, Granite 4 and others:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

from __future__ import annotations

from shoal.server.tool_formats.marked_calls import MarkedCalls
from shoal.server.tool_formats.tool_format import ToolFormat
from shoal.server.tool_parsers import SPACE, Malformed, Steps


class HermesCalls(MarkedCalls):
    openings: tuple[str, ...] = ("<tool_call>",)
    closing = "</tool_call>"

    def _calls(self, markup: str) -> Steps:
        try:
            yield from self._call(self._names)
        except Malformed as error:
            self._give_up(markup, error)
            self._unclosed = self._begun
            return
        self._unclosed = True
        yield from self._skip(SPACE + "}")  # one brace too many is a common slip


FORMAT = ToolFormat(
    "hermes",
    lambda template: "<tool_call>" in template,
    lambda schemas, names, is_whole: HermesCalls(names, is_whole),
)
