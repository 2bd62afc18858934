"""DeepSeek V3, R1 and V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...<｜tool▁call▁end｜>...
<｜tool▁calls▁end｜>. A call of V3.1 is name<｜tool▁sep｜>{...}; one of V3 and R1 is
function<｜tool▁sep｜>name, and the arguments in a block of Markdown. Each reads both."""

from __future__ import annotations

from shoal.text.reading.call_syntax import CallSyntax
from shoal.text.reading.chat_format import ChatFormat
from shoal.text.reading.json_calls import read_object
from shoal.text.reading.reader import Malformed, Reader, Steps

CALLS, CALL, END_OF_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31(ChatFormat):
    name = "deepseek_v31"
    signs: tuple[tuple[str, ...], ...] = ((CALLS,),)
    openings = (CALLS, CALL)
    closing = "<｜tool▁calls▁end｜>"
    syntaxes = (CallSyntax(CALL, "<｜tool▁sep｜>", END_OF_CALL, CALLS, "<｜tool▁calls▁end｜>"),)

    def calls(self, reader: Reader, mark: str) -> Steps:
        if mark == CALLS:
            yield from reader.expect_mark(CALL)
        while True:
            name, _ = yield from reader.up_to("<｜tool▁sep｜>")
            is_block = name.strip() == "function" and (yield from reader.next()) != "{"
            if is_block:
                name, _ = yield from reader.up_to("\n")
                yield from reader.expect_mark("```json")
            if not reader.accepts(name := name.strip()):
                raise Malformed
            yield from read_object(reader, name, end="```" if is_block else END_OF_CALL)
            if is_block:
                yield from reader.one_of("```")
            yield from reader.one_of(END_OF_CALL)
            if not (yield from reader.one_of(CALL)):
                return
            reader.next_call()


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    signs = ((CALLS, "```json"),)
    syntaxes = (
        CallSyntax(
            f"{CALL}function<｜tool▁sep｜>",
            "\n```json\n",
            f"\n```{END_OF_CALL}",
            CALLS,
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
    )
