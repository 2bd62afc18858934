"""Reasoning split off an answer: what a model thinks between <think> and </think> before it speaks."""

from __future__ import annotations

from shoal.server.tool_parsers import SPACE, Part, TextDelta, length_of_start

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Reasoning up to </think>, content from there on; the tags and the white space around them are dropped.

    Only an answer that begins with <think> has reasoning, or one whose prompt ended with it (`thinking`).
    """

    def __init__(self, thinking: bool = False) -> None:
        self._held = ""
        self._thinking = thinking
        self._begun = False  # some reasoning was given
        self._stage = "start"  # then "reasoning", "gap" (the white space behind it), "content"

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
        """Gives the reasoning in `text`; what follows it."""
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
    """Whether the prompt's template has opened <think> already, so that the answer begins within."""
    return prompt.rstrip(SPACE).endswith(OPEN)
