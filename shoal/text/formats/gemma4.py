"""Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>. Texts are raw between their
marks, and keys are bare or between the same marks. FunctionGemma differs in its marks."""

from __future__ import annotations

import json
import re

from shoal.text.reading.call_syntax import CallSyntax, PairedArguments
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import MAX_DEPTH, NUMBER
from shoal.text.reading.reader import Malformed, Reader, Steps
from shoal.text.reading.tagged_values import read_text
from shoal.text.reading.thoughts import CHANNEL, Thoughts

BARE = re.compile(r"[^,{}\[\]<]*")


class Gemma4(ChatFormat):
    name = "gemma4"
    signs = (("<|tool_call>",),)
    openings = ("<|tool_call>",)
    closing = "<tool_call|>"
    thoughts: Thoughts | None = CHANNEL
    quote = '<|"|>'
    syntaxes: tuple[CallSyntax, ...] = (
        CallSyntax("<|tool_call>call:", "{", "}<tool_call|>", argument=PairedArguments(":", ",", '<|"|>')),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from reader.expect_mark("call:")
        name, _ = yield from reader.up_to("{")
        if not reader.accepts(name := name.strip()):
            raise Malformed
        reader.begin(name)
        yield from self._object(reader, 0)
        reader.complete()

    def _object(self, reader: Reader, depth: int) -> Steps:
        """Reads the pairs after the brace."""
        reader.add("{")
        between = ""
        while not (yield from reader.one_of("}")):
            if between:
                yield from reader.expect(",")
            if (yield from reader.one_of(self.quote)):
                key, _ = yield from reader.up_to(self.quote)
                yield from reader.expect(":")
            else:
                key, end = yield from reader.up_to(":", ",", "{", "}", self.closing)
                if end != ":":
                    raise Malformed
            reader.add(f"{between}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            between = ", "
            yield from self._value(reader, depth)
        reader.add("}")

    def _value(self, reader: Reader, depth: int) -> Steps:
        if depth > MAX_DEPTH:
            raise Malformed
        begin = yield from reader.one_of(self.quote, "{", "[")
        if not begin:
            reader.check_cut(self.quote)
        if begin == "{":
            yield from self._object(reader, depth + 1)
        elif begin == "[":
            yield from self._list(reader, depth + 1)
        elif begin:
            yield from read_text(reader, self.quote)
        else:
            yield from _bare(reader)

    def _list(self, reader: Reader, depth: int) -> Steps:
        reader.add("[")
        between = ""
        while not (yield from reader.one_of("]")):
            if between:
                yield from reader.expect(",")
                reader.add(between)
            between = ", "
            yield from self._value(reader, depth)
        reader.add("]")


def _bare(reader: Reader) -> Steps:
    """Reads a number or a word. Another text is a string, though the model left out its marks."""
    text = yield from reader.matching(BARE)
    word = text.strip()
    if not word:
        raise (yield from reader.error())
    is_json = word in ("true", "false", "null") or NUMBER.fullmatch(word)
    reader.add(word if is_json else json.dumps(word, ensure_ascii=False))


class FunctionGemma(Gemma4):
    name = "functiongemma"
    signs = (("<start_function_call>",),)
    openings = ("<start_function_call>",)
    closing = "<end_function_call>"
    thoughts = None
    quote = "<escape>"
    syntaxes = (
        CallSyntax(
            "<start_function_call>call:",
            "{",
            "}<end_function_call>",
            argument=PairedArguments(":", ",", "<escape>"),
        ),
    )
