"""Tool calls of Granite 3, and of Phi-4-mini's official template:
<|tool_call|>[{"name": ..., "arguments": {...}}, ...], sometimes followed by <|/tool_call|>. Without the mark,
an answer that begins with such a list counts if it names tools of the request."""

from __future__ import annotations

from collections.abc import Collection

from shoal.text.formats.tool_format import Schemas, ToolFormat
from shoal.text.formats.tool_parsers import SPACE, MarkedCalls, Steps


class GraniteCalls(MarkedCalls):
    openings = ("<|tool_call|>", "<tool_call>")
    closing = "<|/tool_call|>"
    bare = "["

    def __init__(self, schemas: Schemas, names: Collection[str] | None, is_whole: bool) -> None:
        self._schemas = schemas
        super().__init__(names, is_whole)

    def _calls(self, markup: str) -> Steps:
        is_bare = not markup.strip()
        names = self._schemas if is_bare and self._names is None else self._names
        yield from self._list_of_calls(markup, names, is_strict=is_bare)
        if self._begun:
            self._unclosed = True
            yield from self._skip(SPACE)


FORMAT = ToolFormat(
    "granite", lambda template: "<|tool_call|>" in template, GraniteCalls, begin="<|tool_call|>[", end="]"
)
