"""Calls written as a list in Python: [name(key='text', other=1), ...], keywords and literals only. Llama 4
writes them between <|python_start|> and <|python_end|>, or as the whole answer, which counts if it names
tools of the request; LFM2 between its marks. JSON's words (true, null) and raw line breaks in texts are
read, too."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Generator

from shoal.text.reading import json_calls
from shoal.text.reading.call_syntax import GAP, BareCalls, CallSyntax, PairedArguments
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import MAX_DEPTH
from shoal.text.reading.reader import Ended, Malformed, Reader, Steps
from shoal.text.reading.typed_values import PYTHON_WORDS

NAME = re.compile(r"[\w.-]*")
KEY = re.compile(r"\w*")
MAX_DIGITS = 300  # Python refuses to convert much longer numbers
LITERAL = re.compile(r"[\w.+-]*")
NUMBER = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F]+|(?:0|[1-9](?:_?[0-9])*|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)"
)
PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r"}
ESCAPES |= {"t": "\t", "v": "\v", "0": "\0"}
NUM_DIGITS = {"x": 2, "u": 4, "U": 8}


ARGUMENTS = PairedArguments("=", ", ", words=("True", "False", "None"))


def read_calls(reader: Reader, *, is_known: bool) -> Steps:
    """Reads a list of calls. is_known: they are calls only if the request has the tools."""
    yield from reader.expect("[")
    while True:
        yield from read_call(reader, is_known=is_known)
        if (yield from reader.expect(",]")) == "]" or (yield from reader.one_of("]")):
            return
        reader.next_call()


def read_call(reader: Reader, *, is_known: bool = False) -> Steps:
    """Reads name(key=value, ...)."""
    yield from reader.next()
    name = yield from reader.matching(NAME)
    if not (reader.knows if is_known else reader.accepts)(name):
        raise Malformed
    yield from reader.expect("(")
    has_begun = False
    while not (yield from reader.one_of(")")):
        if has_begun:
            yield from reader.expect(",")
            if (yield from reader.one_of(")")):
                break
        yield from reader.next()
        key = yield from reader.matching(KEY)
        yield from reader.expect("=")
        if not key:
            raise Malformed
        if not has_begun:
            reader.begin(name)
            has_begun = True
        reader.add_key(json.dumps(key, ensure_ascii=False))
        yield from _value(reader, 0)
    if not has_begun:
        reader.begin(name)
    reader.end_arguments()


def _value(reader: Reader, depth: int) -> Steps:
    if depth > MAX_DEPTH:
        raise Malformed
    char = yield from reader.next()
    if char in PLAIN:
        reader.add('"')
        yield from _text(reader)
        reader.add('"')
    elif char in "[(":
        reader.take(char)
        yield from _items(reader, "]" if char == "[" else ")", depth)
    elif char == "{":
        reader.take(char)
        yield from _pairs(reader, depth)
    else:
        reader.add((yield from _literal(reader)))


def _items(reader: Reader, end: str, depth: int) -> Steps:
    reader.add("[")
    between = ""
    while not (yield from reader.one_of(end)):
        if between:
            yield from reader.expect(",")
            if (yield from reader.one_of(end)):
                break
            reader.add(between)
        between = ", "
        yield from _value(reader, depth + 1)
    reader.add("]")


def _pairs(reader: Reader, depth: int) -> Steps:
    reader.add("{")
    between = ""
    while not (yield from reader.one_of("}")):
        if between:
            yield from reader.expect(",")
            if (yield from reader.one_of("}")):
                break
        reader.add(between + '"')
        between = ", "
        if (yield from reader.next()) in PLAIN:
            yield from _text(reader)
        else:
            reader.add((yield from _literal(reader)))
        reader.add('": ')
        yield from reader.expect(":")
        yield from _value(reader, depth + 1)
    reader.add("}")


def _literal(reader: Reader) -> Generator[None, None, str]:
    """Reads a number or a word, and returns its JSON."""
    text = yield from reader.matching(LITERAL)
    if text in ("true", "false", "null"):
        return text
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    if json_calls.NUMBER.fullmatch(text):
        return text
    if not NUMBER.fullmatch(text) or len(text) > MAX_DIGITS:
        raise (yield from reader.error())
    value = ast.literal_eval(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise Malformed
    return json.dumps(value)


def _text(reader: Reader) -> Steps:
    """Reads a string and adds its inner JSON, while it is written."""
    quote = (yield from reader.ahead(1)) * 3
    if not (yield from reader.sees(quote)):
        quote = quote[0]
    reader.take(quote)
    while True:
        char = yield from reader.ahead(1)
        if not char:
            raise Ended
        if char == "\\":
            yield from _escape(reader)
        elif char != quote[0]:
            piece = reader.here(PLAIN[quote[0]])
            reader.take(piece)
            reader.add(json.dumps(piece, ensure_ascii=False)[1:-1])
        elif (yield from reader.sees(quote)):
            reader.take(quote)
            return
        else:  # one quote within three
            reader.take(char)
            reader.add(json.dumps(char)[1:-1])


def _escape(reader: Reader) -> Steps:
    text = yield from reader.ahead(2)
    if len(text) < 2:
        raise Ended
    length = NUM_DIGITS.get(text[1], 0)
    if length:
        text = yield from reader.ahead(2 + length)
        if len(text) < 2 + length:
            raise Ended
        try:
            code = int(text[2:], 16)
            found = json.dumps(chr(code))[1:-1]  # half a character stays an escape, as in JSON
        except (ValueError, OverflowError):
            raise Malformed from None
    else:
        found = json.dumps(ESCAPES.get(text[1], text), ensure_ascii=False)[1:-1]
    reader.take(text)
    reader.add(found)


class Llama4Pythonic(ChatFormat):
    name = "llama4_pythonic"
    signs: tuple[tuple[str, ...], ...] = (("func_name1(",),)
    openings: tuple[str, ...] = ("<|python_start|>",)
    closing = "<|python_end|>"
    # The template shows calls without the marks.
    syntaxes = (CallSyntax("", "(", ")", "[", "]", ", ", argument=ARGUMENTS),)
    bare: BareCalls | None = BareCalls(
        GAP + r"\[" + GAP + "({names})" + GAP + r"\(", GAP + r"\[" + GAP + "{name}" + GAP + r"\("
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_calls(reader, is_known=not mark)

    def bare_calls(self, reader: Reader) -> Steps:
        yield from reader.read_bare_calls("[")
