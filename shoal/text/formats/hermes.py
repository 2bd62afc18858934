"""Tool calls of Hermes, Qwen 2.5 and 3, Granite 4 and others:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

from __future__ import annotations

from shoal.text.formats.tool_format import ToolFormat
from shoal.text.formats.tool_parsers import TaggedCalls

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FORMAT = ToolFormat(
    "hermes",
    lambda template: OPENING in template,
    lambda schemas, names, is_whole: TaggedCalls(OPENING, CLOSING, names, is_whole),
)
