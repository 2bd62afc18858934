"""gpt-oss's Harmony: messages on the channels analysis (reasoning), commentary and final (words). A message
to a recipient is a call, on whatever channel, and its text is the arguments. Every part of a header may be
missing or in another place."""

from __future__ import annotations

import re

from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.json_calls import read_object
from shoal.text.reading.messages import Messages
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.thoughts import HARMONY

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)\s*")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# Parts of a header, as regexes: its channel, its recipient and the format of its text.
ANY, TO, JSON = "(analysis|commentary)", r"to=(functions\.)?{name}", r"( ?<\|constrain\|>json| json)?"
ROLES = ("assistant", "user", "all", "system")


class Harmony(Messages):
    name = "openai"
    signs = (("<|start|>", "<|message|>", "<|channel|>"),)
    thoughts = HARMONY
    ends = ("<|end|>", "<|call|>", "<|return|>")
    syntaxes = (
        CallSyntax(
            "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", is_single=True
        ),
    )
    heads = ("<|channel|>", "<|constrain|>", "to=")
    thoughts_head = r"<\|channel\|>analysis<\|message\|>"
    words_head = rf"<\|channel\|>(commentary|final){JSON}<\|message\|>"
    call_head = rf"(<\|channel\|>{ANY} {TO}| ?{TO}<\|channel\|>{ANY}){JSON}<\|message\|>"

    def is_thought(self, header: str) -> bool:
        channel = CHANNEL.search(header)
        return channel is not None and channel[1] == "analysis"

    def tool_of(self, header: str) -> str:
        recipient = RECIPIENT.search(header)
        return recipient[1] if recipient is not None and recipient[1] not in ROLES else ""

    def words_of(self, header: str) -> str:
        return CHANNEL.sub("", header.removeprefix("assistant"), count=1)

    def calls(self, reader: Reader, mark: str) -> Steps:
        tool = self.tool_of(mark)
        if not reader.accepts(tool):
            raise Malformed
        if (yield from reader.is_over(*self.ends)):
            reader.begin(tool)
            reader.end_arguments()
        else:
            yield from read_object(reader, tool)
