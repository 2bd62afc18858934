"""The interface of a model family's format of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.text.formats.tool_parsers import Parser

Schemas = Mapping[str, dict[str, Any]]  # schema of the arguments by the tool's name


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls.

    `is_of` returns True for a chat template with this format. `reader` builds a parser for one answer from
    the tools' schemas, the only names that are calls (None: all), and True for an answer that arrives as a
    whole. The other fields describe a call as JSON for a grammar, which `reader` also reads.
    """

    name: str
    is_of: Callable[[str], bool]
    reader: Callable[[Schemas, Collection[str] | None, bool], Parser]
    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    separator: str = "\n"
    arguments: str = "arguments"  # the key in a call's JSON
