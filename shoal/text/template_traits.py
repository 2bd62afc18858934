"""Traits of a chat template, found by rendering short conversations: its source is not enough, as templates
refuse, drop and rename fields under arbitrary conditions."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]

WORD = "Does this appear?"
OTHER = "And does that?"
THIRD = "And does a third?"
SHORT_ID = "a1B2c3D4e"  # nine letters and digits, as Mistral's templates want them
LONG_ID = "call_8f14e45fceea167a5a36dedd4bea2543"
USER: Message = {"role": "user", "content": "Hello"}


class TemplateTraits:
    """Traits of one template. Each is determined on first use, and cached."""

    def __init__(self, render: Callable[[list[Message]], str | None]) -> None:
        """render: renders a conversation; returns None if the template refuses it."""
        self._render = render
        self._takes_arguments: dict[type, bool] = {}

    @functools.cached_property
    def takes_several_calls(self) -> bool:
        """True if a message may have several calls, or if a message with one call is refused, too."""
        both = self._texts(*_calls("probe_a", "probe_b"))
        return any("probe_a" in text and "probe_b" in text for text in both) or not self._texts(
            *_calls("probe_a")
        )

    @functools.cached_property
    def wants_short_ids(self) -> bool:
        """True if a call's id must have nine letters and digits."""
        return not self._texts(*_calls("probe_a", call_id=LONG_ID)) and bool(self._texts(*_calls("probe_a")))

    @functools.cached_property
    def wants_ids(self) -> bool:
        """True if a call must have an id."""
        return not self._texts(*_calls("probe_a", call_id=None)) and bool(self._texts(*_calls("probe_a")))

    def takes_arguments(self, arguments: Any) -> bool:
        """True if the template writes a call's arguments of this type: an object, a list, or text."""
        kind = type(arguments)
        if kind not in self._takes_arguments:
            tried: Any = {"x": WORD} if kind is dict else [WORD] if kind is list else WORD
            texts = self._texts(*_calls("probe_a", arguments=tried))
            self._takes_arguments[kind] = any(WORD in text for text in texts)
        return self._takes_arguments[kind]

    @functools.cached_property
    def takes_null_beside_calls(self) -> bool:
        """True if the content of an answer with calls may be null."""
        texts = self._texts(*_calls("probe_a"), contents=(None,))
        return any("None" not in text for text in texts)

    @functools.cached_property
    def drops_calls_beside_words(self) -> bool:
        """True if the template drops the calls of an answer that has content, too."""
        return not self._writes_calls(THIRD) and (self.writes_calls_beside_null or self._writes_calls(""))

    @functools.cached_property
    def writes_calls_beside_null(self) -> bool:
        """True if the template writes the calls of an answer whose content is null."""
        return self._writes_calls(None)

    def _writes_calls(self, content: str | None) -> bool:
        return any(WORD in text for text in self._texts(*_calls("probe_a"), contents=(content,)))

    @functools.cached_property
    def takes_instructions_before_results(self) -> bool:
        """True if a system message may stand between a call and its result, or if it is refused elsewhere,
        too, so that it is moved anyway."""
        system: Message = {"role": "system", "content": THIRD}
        texts = self._texts(*_calls("probe_a"), before_results=[system])
        return all(OTHER in text for text in texts)

    @functools.cached_property
    def takes_words_after_results(self) -> bool:
        """True if a user message may follow the result of a call, or if a result is refused, too."""
        call = _calls("probe_a")
        return bool(self._texts(*call, more=[USER])) or not self._texts(*call)

    @functools.cached_property
    def takes_thoughts_beside_words(self) -> bool:
        """True if an answer with calls may have both content and `thinking`."""
        return bool(self._texts(*_calls("probe_a"), contents=(OTHER,), thoughts={"thinking": OTHER}))

    @functools.cached_property
    def takes_empty_answers(self) -> bool:
        """True if an answer without calls may be empty, or if other answers are refused, too."""

        def takes(content: str) -> bool:
            return self._render([USER, {"role": "assistant", "content": content}, USER]) is not None

        return takes("") or not takes(OTHER)

    @functools.cached_property
    def takes_null(self) -> bool:
        """True if the content of an answer without calls may be null."""
        return _is_nothing(self._render([USER, {"role": "assistant", "content": None}, USER]))

    @functools.cached_property
    def writes_developer(self) -> bool:
        """True if the template writes messages of the role `developer`."""
        return WORD in (self._render([{"role": "developer", "content": WORD}, USER]) or "")

    def _texts(
        self,
        *calls: dict[str, Any],
        contents: Sequence[str | None] = (None, ""),
        before_results: Sequence[Message] = (),
        more: Sequence[Message] = (),
        thoughts: Message | None = None,
    ) -> list[str]:
        """Returns the rendered texts of an answer with these calls, `before_results`, the results and `more`:
        one for each form of the content, and of the arguments if they are not given, so that traits are
        independent of each other. Refused forms are left out."""
        found = []
        for content in contents:
            for as_given in (dict, json.dumps):
                made = []
                for call in calls:
                    # A template may write no names, so the arguments name the call, too.
                    arguments = as_given({"x": f"{WORD} {call['function']['name']}"})
                    function = {"arguments": arguments, **_given(call["function"])}
                    made.append({**call, "function": function})
                results = [
                    {"role": "tool", "tool_call_id": call.get("id"), "name": "probe_a", "content": OTHER}
                    for call in calls
                ]
                answer = {"role": "assistant", "content": content, "tool_calls": made, **(thoughts or {})}
                if (text := self._render([USER, answer, *before_results, *results, *more])) is not None:
                    found.append(text)
        return found


def _calls(*names: str, call_id: str | None = SHORT_ID, arguments: Any = None) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name in names
    ]
    return (
        calls if call_id is None else [{"id": call_id[:-1] + str(i), **call} for i, call in enumerate(calls)]
    )


def _given(function: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if value is not None}


def _is_nothing(text: str | None) -> bool:
    return text is not None and "None" not in text
