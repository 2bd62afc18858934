"""OLMo 3: <function_calls>name(key='text', ...)</function_calls>, a call in each line, in Python."""

from __future__ import annotations

from shoal.text.formats import pythonic
from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.reader import Reader, Steps


class Olmo3(ChatFormat):
    name = "olmo3"
    signs = (("<function_calls>",),)
    openings = ("<function_calls>",)
    closing = "</function_calls>"
    syntaxes = (CallSyntax("", "(", ")", "<function_calls>", closing, "\n", argument=pythonic.ARGUMENTS),)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from pythonic.read_call(reader)
        while not (yield from reader.is_over(self.closing)):
            reader.next_call()
            yield from pythonic.read_call(reader)
