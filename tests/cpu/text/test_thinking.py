"""The wishes of a request about thinking reach the chat template of each family in its own variables and words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.text.chat_template import ChatTemplate
from shoal.text.thinking import SCALE, Thinking

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
HI = [{"role": "user", "content": "Hi."}]


def variables(family, wishes, **given):
    return ChatTemplate((FOLDER / f"{family}.jinja").read_text()).thinking.of(wishes, given)


def prompt(family, wishes, **given):
    template = ChatTemplate((FOLDER / f"{family}.jinja").read_text(), {"bos_token": "<s>"})
    found = template.thinking.of(wishes, given)
    return template.render(HI, add_generation_prompt=True, **{**found, **given})


@pytest.mark.parametrize(
    "family, name, words",
    [
        ("gpt-oss", "reasoning_effort", "low low low medium high high high"),
        ("muse", "reasoning_strength", "low low low medium high high high"),
        ("hunyuan3", "reasoning_effort", "no_think low low high high high high"),
        ("qwen3.8", "reasoning_effort", "- low low medium xhigh xhigh xhigh"),
        ("deepseek-v4", "reasoning_effort", "- minimal low medium high xhigh max"),
        ("qwen3", "reasoning_effort", "- - - - - - -"),
        ("nemotron3", "low_effort", "- True True False False False False"),
    ],
)
def test_an_effort_goes_to_the_nearest_word_of_the_template(family, name, words):
    found = [variables(family, Thinking.of_effort(effort)).get(name, "-") for effort in SCALE]
    assert " ".join(map(str, found)) == words


def test_a_word_of_the_templates_own_is_passed_as_it_is():
    assert variables("hunyuan3", Thinking.of_effort("no_think")) == {"reasoning_effort": "no_think"}


@pytest.mark.parametrize(
    "family, switched_off, switched_on",
    [
        ("qwen3", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"),
        ("qwen3.5", "<think>\n\n</think>\n\n", "<think>\n"),
        ("nemotron3", "<think></think>", "<think>\n"),
        ("glm4.6", "<think></think>", "<|assistant|>"),
        ("glm4.7", "</think>", "<think>"),
        ("deepseek-v3.1", "</think>", "<think>"),
        ("deepseek-v3.2", "</think>", "<think>"),
        ("deepseek-v4", "</think>", "<think>"),
        ("kimi-k2.5", "<think></think>", "<think>"),
        ("laguna", "</think>", "<think>"),
        ("minimax-m2", "<think>\n", "<think>\n"),
    ],
)
def test_the_switch_of_a_family_is_used(family, switched_off, switched_on):
    for wishes in (Thinking(is_on=False), Thinking.of_effort("none")):
        assert prompt(family, wishes).endswith(switched_off)
    for wishes in (Thinking(is_on=True), *map(Thinking.of_effort, SCALE[1:])):
        assert prompt(family, wishes).endswith(switched_on)


def test_a_template_that_thinks_only_on_demand_is_switched_on():
    assert "<|think|>" not in prompt("gemma4", Thinking())
    assert "<|think|>" in prompt("gemma4", Thinking.of_effort("low"))
    assert "<|think|>" not in prompt("gemma4", Thinking.of_effort("none"))
    assert variables("granite3", Thinking(is_on=True)) == {"thinking": True}


def test_the_requests_own_variables_win():
    high = Thinking.of_effort("high")
    assert variables("deepseek-v4", high, enable_thinking=False) == {"reasoning_effort": "high"}
    assert variables("deepseek-v4", high, reasoning_effort="max") == {
        "enable_thinking": True,
        "thinking": True,
    }
    assert prompt("deepseek-v4", high, enable_thinking=False).endswith("</think>")


def test_a_request_that_says_nothing_leaves_the_template_its_defaults():
    for path in FOLDER.glob("*.jinja"):
        assert variables(path.stem, Thinking()) == {}


def test_a_template_that_is_told_the_budget_gets_it():
    template = ChatTemplate("{{ messages[0].content }} {{ thinking_budget }}")
    assert template.thinking.of(Thinking(budget=512), {}) == {"thinking_budget": 512}
    assert template.thinking.of(Thinking(budget=512), {"thinking_budget": 8}) == {}
