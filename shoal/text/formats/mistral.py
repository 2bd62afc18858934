"""Tool calls of Mistral's models. Up to version 7 of the tokenizer a list:
[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]; from version 11 on
[TOOL_CALLS]name[ARGS]{...} for each call, sometimes with [CALL_ID]... after the name or without [ARGS]."""

from __future__ import annotations

from collections.abc import Generator

from shoal.text.formats.tool_format import ToolFormat
from shoal.text.formats.tool_parsers import SPACE, Malformed, MarkedCalls, Steps

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
ENDS_OF_WORD = "[{" + SPACE


class MistralCalls(MarkedCalls):
    openings = ("[TOOL_CALLS]",)

    def _calls(self, markup: str) -> Steps:
        self._give_arguments()
        self._raw.clear()
        self._begun = self._is_complete = False
        try:
            first = yield from self._next()
            if first == "[":
                yield from self._list_of_calls(markup + "".join(self._raw), self._names)
            elif first == "{":
                yield from self._call(self._names)
            else:
                yield from self._named_call()
        except Malformed as error:
            self._give_up(markup, error)
            return
        if self._begun:
            yield from self._skip(SPACE)

    def _named_call(self) -> Steps:
        name = yield from self._word_of_text()
        if not name.isprintable() or (name not in self._names if self._names is not None else not name):
            raise Malformed
        if (yield from self._try_take(CALL_ID)):
            yield from self._word_of_text()
        yield from self._try_take(ARGS)
        if (yield from self._next()) != "{":
            raise Malformed
        self._begin(name)
        self._inside = True
        yield from self._value()
        self._inside = False
        self._give_arguments()
        self._is_complete = True

    def _word_of_text(self) -> Generator[None, None, str]:
        """Takes and returns the text before the next bracket, brace or white space."""
        word = ""
        while (char := (yield from self._ahead(1))) and char not in ENDS_OF_WORD:
            self._take(char)
            word += char
        return word

    def _try_take(self, mark: str) -> Generator[None, None, bool]:
        yield from self._next()
        if found := (yield from self._ahead(len(mark))) == mark:
            self._take(mark)
        return found


FORMAT = ToolFormat(
    "mistral",
    lambda template: "[TOOL_CALLS]" in template,
    lambda schemas, names, is_whole: MistralCalls(names, is_whole),
    begin="[TOOL_CALLS][",
    end="]",
)
