"""What a family's form of tool calls is to the rest of the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.text.formats.tool_parsers import Parser

Schemas = Mapping[str, dict[str, Any]]  # the arguments' schema of each tool, by the tool's name


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One form of tool calls.

    `is_of` says whether a chat template makes its model write this form. `reader` makes a parser for one
    answer from the tools' schemas, the names that alone are calls (None: all are), and whether the answer
    comes whole. The rest is how a grammar lets a call be written as JSON, which `reader` understands, too.
    """

    name: str
    is_of: Callable[[str], bool]
    reader: Callable[[Schemas, Collection[str] | None, bool], Parser]
    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    separator: str = "\n"
    arguments: str = "arguments"  # the key in a call's JSON
