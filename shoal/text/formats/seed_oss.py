"""Seed-OSS: <seed:tool_call><function=name><parameter=key>value</parameter>...</function></seed:tool_call>,
and <seed:think> around reasoning. A value is all the text between its tags."""

from __future__ import annotations

from shoal.text.formats.qwen3_coder import END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER, Qwen3Coder
from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.chat_format import JsonCall

OPENING, CLOSING = "<seed:tool_call>", "</seed:tool_call>"


class SeedOss(Qwen3Coder):
    name = "seed_oss"
    signs = ((OPENING,),)
    openings = (OPENING, FUNCTION)
    closing = CLOSING
    json_call = JsonCall(f"{OPENING}\n", f"\n{CLOSING}")
    trims_line = False
    syntaxes = (
        CallSyntax(
            f"{OPENING}\n{FUNCTION}",
            ">\n",
            f"{END_OF_FUNCTION}\n{CLOSING}",
            separator="\n",
            argument=TaggedArgument(PARAMETER, ">", END_OF_PARAMETER, after="\n"),
        ),
    )
