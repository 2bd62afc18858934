"""Answers that a grammar has made calls: a list of calls for tool_choice "required", the arguments alone for
a named function."""

from __future__ import annotations

from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import read_list
from shoal.text.reading.reader import Reader, Steps


class _Enforced(ChatFormat):
    name = "none"

    def __init__(self, form: ChatFormat) -> None:
        """form: the model's, which has the form of ids."""
        self._form = form

    def new_id(self) -> str:
        return self._form.new_id()


class ListedCalls(_Enforced):
    """[{"name": ..., "parameters": {...}}, ...]"""

    def answer(self, reader: Reader) -> Steps:
        yield from reader.read_calls("", "")
        yield from super().answer(reader)

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_list(reader)


class NamedCall(_Enforced):
    """The arguments of one tool."""

    def __init__(self, form: ChatFormat, tool: str) -> None:
        super().__init__(form)
        self._tool = tool

    def answer(self, reader: Reader) -> Steps:
        text = yield from reader.available()
        if text:
            reader.begin(self._tool)
        while text:
            reader.copies = True
            reader.take(text)
            text = yield from reader.available()
