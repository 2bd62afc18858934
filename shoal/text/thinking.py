"""`Thinking`: what a request says about the model's thoughts. `ThinkingVariables`: the variables by which a
chat template takes it, whose names and words differ between families."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.text.template_traits import WORD

# Words of all APIs, in this order. A template knows some of them.
SCALE = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OFF_WORDS = ("none", "no_think")
# gpt-oss' template writes any word into the prompt. The model was trained on these.
SPOKEN_WORDS = ("low", "medium", "high")
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
SWITCHES: Mapping[str, tuple[Any, Any]] = {  # the values for off and on
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "thinking_mode": ("disabled", "enabled"),
}
FLAGS: Mapping[str, str] = {"low_effort": "low", "medium_effort": "medium"}  # true up to this effort
BUDGETS = ("thinking_budget", "reasoning_budget")


@dataclass(frozen=True, slots=True)
class Thinking:
    """A request's wishes. None: the template's own default."""

    is_on: bool | None = None
    effort: str | None = None  # a word of SCALE, or of the template's own
    budget: int | None = None  # most tokens

    @classmethod
    def of_effort(cls, effort: str | None, budget: int | None = None) -> Thinking:
        """Returns the wishes of a request that says an effort, which "none" switches off."""
        return cls(None if effort is None else effort != "none", effort, budget)


UNSPECIFIED = Thinking()


class ThinkingVariables:
    """The variables of one template about thinking. Words that the template takes are found by rendering it
    on first use, and cached."""

    def __init__(
        self,
        names: Collection[str],
        constants: Collection[str],
        render: Callable[[dict[str, Any]], str | None],
    ) -> None:
        """names: all variables of the template. constants: all texts in its code. render: renders a
        conversation with these variables; returns None if the template refuses them."""
        self._switches = [name for name in SWITCHES if name in names]
        self._efforts = [name for name in EFFORTS if name in names]
        self._flags = [name for name in FLAGS if name in names]
        self._budgets = [name for name in BUDGETS if name in names]
        self._off_words = [word for word in OFF_WORDS if word in constants]
        self._render = render
        self._words: dict[str, list[str]] = {}

    def of(self, wishes: Thinking, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables for a request that gives the variables `given` itself: these win."""
        found: dict[str, Any] = {}
        if wishes.budget is not None:
            found.update((name, wishes.budget) for name in self._budgets if name not in given)
        if wishes.is_on is None:
            return found
        if not any(name in given for name in self._switches):
            found.update((name, SWITCHES[name][wishes.is_on]) for name in self._switches)
        for name in self._efforts:
            if name not in given and (word := self._word(name, wishes)) is not None:
                found[name] = word
        if wishes.is_on and wishes.effort in SCALE:
            place = SCALE.index(wishes.effort)
            found.update((n, place <= SCALE.index(FLAGS[n])) for n in self._flags if n not in given)
        return found

    def _word(self, name: str, wishes: Thinking) -> str | None:
        off = self._off_words[0] if self._off_words else None
        if not wishes.is_on:
            if self._switches:
                return None
            return off if off is not None or wishes.effort is None else self._nearest(name, wishes.effort)
        if wishes.effort is not None:
            return self._nearest(name, wishes.effort)
        return self._nearest(name, "medium") if off is not None and not self._switches else None

    def _nearest(self, name: str, effort: str) -> str:
        """Returns the word of the template that is nearest to `effort`; of two, the higher one. A word beyond
        SCALE may be the template's own."""
        if effort not in SCALE:
            return effort
        place = SCALE.index(effort)
        words = [(abs(SCALE.index(word) - place), -SCALE.index(word), word) for word in self._taken(name)]
        return min(words)[2] if words else effort

    def _taken(self, name: str) -> list[str]:
        """Returns the words of SCALE that the template takes for the variable."""
        if name not in self._words:
            on = {switch: values[True] for switch, values in SWITCHES.items() if switch in self._switches}
            if WORD in (self._render({**on, name: WORD}) or ""):
                self._words[name] = list(SPOKEN_WORDS)
            else:
                known = [word for word in SCALE if word not in OFF_WORDS or word in self._off_words]
                self._words[name] = [word for word in known if self._render({**on, name: word}) is not None]
        return self._words[name]
