"""Muse Glimmer: messages to oneself (reasoning), to the user and to tools; a call is
<atem:function_calls><atem:invoke name="f"><atem:parameter name="k">v</atem:parameter></atem:invoke>...
</atem:function_calls>."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax, TaggedArgument
from shoal.text.reading.invokes import Invokes
from shoal.text.reading.messages import Messages
from shoal.text.reading.thoughts import TO_SELF


class Muse(Messages, Invokes):
    name = "muse_glimmer"
    signs = (("<atem:function_calls>",),)
    openings = ("<atem:function_calls>",)
    closing = "</atem:function_calls>"
    prefix = "atem:"
    thoughts = TO_SELF
    ends = ("<|eom|>", "<|eot|>")
    heads = ("to=",)
    thoughts_head = r" ?to=self<\|message\|>"
    words_head = r" ?to=user<\|message\|>"
    call_head = r' ?to={name}<\|message\|><atem:function_calls>\n<atem:invoke name="{name}">\n'
    syntaxes = (
        CallSyntax(
            " to=",
            '<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
            "</atem:invoke>\n</atem:function_calls>",
            argument=TaggedArgument('<atem:parameter name="', '">', "</atem:parameter>", after="\n"),
            is_single=True,
        ),
    )

    def is_thought(self, header: str) -> bool:
        return "to=self" in header

    def words_of(self, header: str) -> str:
        return header.removeprefix("assistant")
