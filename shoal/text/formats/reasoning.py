"""Splits reasoning from an answer: the text between <think> and </think> at its beginning."""

from __future__ import annotations

import re

from shoal.text.formats.tool_parsers import SPACE, Part, TextDelta, length_of_start

OPEN, CLOSE = "<think>", "</think>"
# A mark of chat templates that begins or ends a turn, and the head of a turn: a mark, a role, and possibly
# empty reasoning, which Qwen3's template writes before the last answer.
MARK = (
    r"(?:<\|[^<>|\n]{1,40}\|?>|<[^<>|\n]{1,40}\|>|<｜[^<>\n]{1,40}｜>|\[/?[A-Z_]{4,20}\]|\]~b\]|\[e~\[|</?s>"
)
MARK += r"|<(?:start|end)_of_turn>|<(?:user|assistant|system|tool)>)"
TURN_MARK = re.compile(MARK)
HEAD = re.compile(rf"{MARK}\s*\w{{0,16}}\s*(?:<think>\s*</think>\s*)?\Z")
HEAD_LENGTH = 200  # characters of a prompt in which a head is searched


class ThinkParser:
    """Splits text into reasoning up to </think> and content after it; drops the tags and the white space
    around them.

    Only an answer that begins with <think> has reasoning, or one whose prompt ended with it (`thinking`) or
    with unfinished reasoning (`is_amid`), which the answer continues without a change.
    """

    def __init__(self, thinking: bool = False, is_amid: bool = False) -> None:
        self._held = ""
        self._thinking = thinking
        self._begun = is_amid  # some reasoning was given
        # then "reasoning", "gap" (the white space after it), "content"
        self._stage = "reasoning" if is_amid else "start"

    def push(self, text: str) -> list[Part]:
        if self._stage == "content":
            return [TextDelta(text)] if text else []
        text = self._held + text
        self._held = ""
        parts: list[Part] = []
        if self._stage == "start":
            solid = text.lstrip(SPACE)
            if len(solid) < len(OPEN) and OPEN.startswith(solid):
                self._held = text
                return parts
            if solid.startswith(OPEN) or self._thinking:
                text = solid.removeprefix(OPEN)
                self._stage = "reasoning"
            else:
                self._stage = "content"
        if self._stage == "reasoning":
            text = self._reasoning(text, parts)
        if self._stage == "gap" and (text := text.lstrip(SPACE)):
            self._stage = "content"
        if self._stage == "content" and text:
            parts.append(TextDelta(text))
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._stage == "reasoning" or (self._stage == "start" and self._thinking):
            held = held.rstrip(SPACE) if self._begun else held.strip(SPACE)
            return [TextDelta(held, reasoning=True)] if held else []
        return [TextDelta(held)] if held else []

    def _reasoning(self, text: str, parts: list[Part]) -> str:
        """Emits the reasoning in `text`; returns the text after it."""
        if not self._begun:
            text = text.lstrip(SPACE)
        thought, tag, rest = text.partition(CLOSE)
        solid = (thought if tag else thought[: len(thought) - length_of_start(thought, CLOSE)]).rstrip(SPACE)
        if solid:
            self._begun = True
            parts.append(TextDelta(solid, reasoning=True))
        if tag:
            self._stage = "gap"
            return rest
        self._held = text[len(solid) :]
        return ""


def opens_thinking(prompt: str) -> bool:
    """Returns True if the prompt's template has opened <think>, so that the answer begins with reasoning."""
    return prompt.rstrip(SPACE).endswith(OPEN)


def continues_thought(prompt: str) -> bool:
    """Returns True if the prompt ends with unfinished reasoning of the answer: its last turn begins with
    <think> without a closing tag. A <think> in an earlier turn is followed by the mark of a later one."""
    start = prompt.rfind(OPEN)
    if start < 0 or opens_thinking(prompt):
        return False
    rest = prompt[start + len(OPEN) :]
    if CLOSE in rest or TURN_MARK.search(rest):
        return False
    return HEAD.search(prompt[max(0, start - HEAD_LENGTH) : start]) is not None
