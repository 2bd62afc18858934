"""InternLM 2.5 and 3: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>"""

from __future__ import annotations

from shoal.text.reading.call_syntax import json_syntax
from shoal.text.reading.chat_format import ChatFormat, JsonCall
from shoal.text.reading.json_calls import read_call
from shoal.text.reading.reader import Reader, Steps


class InternLM(ChatFormat):
    name = "internlm"
    signs = (("<|action_start|>",),)
    openings = ("<|action_start|><|plugin|>",)
    closing = "<|action_end|>"
    json_call = JsonCall("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters")
    syntaxes = (
        json_syntax(
            "", "", "\n", before="<|action_start|><|plugin|>", after="<|action_end|>", key="parameters"
        ),
    )

    def calls(self, reader: Reader, mark: str) -> Steps:
        yield from read_call(reader)
