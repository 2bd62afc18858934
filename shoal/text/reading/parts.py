"""The parts of an answer as they arrive: pieces of its words, of its reasoning and of its calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """A new part of call number `index`. Its id and name come once; its arguments, a JSON text, in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str
    reasoning: bool = False


Part = TextDelta | CallDelta
