"""Hunyuan A13B: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, and words within
<answer>. Hunyuan 3: <tool_calls><tool_call>name<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>...
</tool_call>...</tool_calls>; in its published checkpoints each name of a tag ends with :opensource."""

from __future__ import annotations

from shoal.text.formats.glm45 import read_call
from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument, json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps

CALLS, END_OF_CALLS = "<tool_calls>", "</tool_calls>"
SUFFIX = ":opensource"


class HunyuanA13B(ChatFormat):
    name = "hunyuan_a13b"
    signs = ((CALLS,),)
    openings = (CALLS,)
    closing = END_OF_CALLS
    silent = ("<answer>", "</answer>")
    json_call = JsonCall("<tool_calls>[", "]</tool_calls>")
    syntaxes = (json_syntax("<tool_calls>[", "]</tool_calls>", ", "),)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader)


def syntax_of(suffix: str) -> CallSyntax:
    """suffix: the end of each tag's name."""
    return CallSyntax(
        f"<tool_call{suffix}>",
        f"<tool_sep{suffix}>\n",
        f"</tool_call{suffix}>",
        f"<tool_calls{suffix}>\n",
        f"\n</tool_calls{suffix}>",
        "\n",
        TaggedArgument(
            f"<arg_key{suffix}>",
            f"</arg_key{suffix}>\n<arg_value{suffix}>",
            f"</arg_value{suffix}>",
            after="\n",
        ),
    )


class HyV3(ChatFormat):
    name = "hy_v3"
    signs = (("<tool_sep",),)
    openings = (CALLS, "<tool_call>", f"<tool_calls{SUFFIX}>", f"<tool_call{SUFFIX}>")
    syntaxes = (syntax_of(""), syntax_of(SUFFIX))

    def calls(self, reader: Reader, mark: str) -> Steps:
        suffix = SUFFIX if mark.endswith(f"{SUFFIX}>") else ""
        opening = f"<tool_call{suffix}>"
        if mark != opening:
            yield from reader.expect_mark(opening)
        while True:
            yield from read_call(reader, suffix)
            if not (yield from reader.one_of(opening)):
                break
            reader.next_call()
        yield from reader.one_of(f"</tool_calls{suffix}>")
