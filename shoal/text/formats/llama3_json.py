"""Tool calls of Llama 3: {"name": ..., "parameters": {...}}; ... at the start of the answer, or after
<|python_tag|>. A call must name one of the tools, as it has no other difference from an answer in JSON."""

from __future__ import annotations

from shoal.text.formats.tool_format import ToolFormat
from shoal.text.formats.tool_parsers import SPACE, Malformed, MarkedCalls, Steps


class Llama3Calls(MarkedCalls):
    openings = ("<|python_tag|>",)
    bare = "{"

    def _calls(self, markup: str) -> Steps:
        while True:
            try:
                yield from self._call(self._names, is_strict=True)
            except Malformed as error:
                self._give_up(markup, error)
                return
            yield from self._skip(SPACE + ";")
            if (yield from self._ahead(1)) != "{":
                return
            markup = ""


FORMAT = ToolFormat(
    "llama3_json",
    lambda template: "<|python_tag|>" in template or "ipython" in template,
    lambda schemas, names, is_whole: Llama3Calls(names if names is not None else schemas, is_whole),
    begin="",
    end="",
    separator="; ",
    arguments="parameters",
)
