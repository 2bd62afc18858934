"""What a chat template takes, found out by trying it with short conversations: its source tells too little,
as templates refuse, drop and rename by conditions of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

WORD = "Does this appear?"
OTHER = "And does that?"
SHORT_ID = "a1B2c3D4e"  # nine letters and digits, as Mistral's templates want them
LONG_ID = "call_8f14e45fceea167a5a36dedd4bea2543"
USER: Message = {"role": "user", "content": "Hello"}


class TemplateTraits:
    """Each trait is tried when it is first asked for, and kept."""

    def __init__(self, render: Callable[[list[Message]], str | None]) -> None:
        """render: a conversation through the template; None if it refuses."""
        self._render = render
        self._takes_arguments: dict[type, bool] = {}

    @functools.cached_property
    def takes_several_calls(self) -> bool:
        """Whether a message may have several calls. False only if a message with one is taken."""
        both = self._render([*_called("probe_a", "probe_b"), *_results(2)])
        if both is not None and "probe_a" in both and "probe_b" in both:
            return True
        return self._render([*_called("probe_a"), *_results(1)]) is None

    @functools.cached_property
    def wants_short_ids(self) -> bool:
        """Whether a call's id must have nine letters and digits."""

        def taken(call_id: str) -> bool:
            return (
                self._render([*_called("probe_a", call_id=call_id), *_results(1, call_id=call_id)])
                is not None
            )

        return not taken(LONG_ID) and taken(SHORT_ID)

    def takes_arguments(self, arguments: Any) -> bool:
        """Whether the template writes a call's arguments of this type: an object, a list, or text."""
        kind = type(arguments)
        if kind not in self._takes_arguments:
            tried: Any = {"x": WORD} if kind is dict else [WORD] if kind is list else WORD
            text = self._render([*_called("probe_a", arguments=tried), *_results(1)])
            self._takes_arguments[kind] = text is not None and WORD in text
        return self._takes_arguments[kind]

    @functools.cached_property
    def takes_null_beside_calls(self) -> bool:
        """Whether the content of an answer with calls may be null."""
        return _is_nothing(self._render([*_called("probe_a", content=None), *_results(1)]))

    @functools.cached_property
    def takes_null(self) -> bool:
        """Whether the content of an answer without calls may be null."""
        return _is_nothing(self._render([USER, {"role": "assistant", "content": None}, USER]))

    @functools.cached_property
    def writes_developer(self) -> bool:
        """Whether the template writes messages of the role `developer`."""
        return WORD in (self._render([{"role": "developer", "content": WORD}, USER]) or "")


def _called(
    *names: str, call_id: str = SHORT_ID, arguments: Any = None, content: str | None = ""
) -> list[Message]:
    calls = [
        {
            "id": call_id[:-1] + str(i),
            "type": "function",
            "function": {"name": name, "arguments": {"x": WORD} if arguments is None else arguments},
        }
        for i, name in enumerate(names)
    ]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls}]


def _results(count: int, call_id: str = SHORT_ID) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call_id[:-1] + str(i), "name": "probe_a", "content": OTHER}
        for i in range(count)
    ]


def _is_nothing(text: str | None) -> bool:
    return text is not None and "None" not in text
