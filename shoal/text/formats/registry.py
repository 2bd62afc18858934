"""All formats: which one a chat template asks for, and by its name."""

from __future__ import annotations

import re

from shoal.text.formats.chat_format import ChatFormat, PlainFormat
from shoal.text.formats.granite import Granite
from shoal.text.formats.hermes import Hermes
from shoal.text.formats.llama3_json import Llama3Json
from shoal.text.formats.mistral import Mistral
from shoal.text.formats.qwen3_coder import Qwen3Coder
from shoal.text.formats.thoughts import THOUGHTS, Thoughts

# In this order, as some signs contain others: the first format in a template is the model's.
FORMATS: tuple[ChatFormat, ...] = (Qwen3Coder(), Mistral(), Granite(), Hermes(), Llama3Json())
PLAIN = PlainFormat()
BY_NAME: dict[str, ChatFormat] = {form.name: form for form in FORMATS}
THOUGHTS_BY_NAME: dict[str, Thoughts] = {thoughts.name: thoughts for thoughts in THOUGHTS}
DEFAULT = "hermes"
TOOLS = re.compile(r"\btools\b")

# Families without a parser, by marks of their templates. A template may also have marks of FORMATS.
UNREAD: dict[str, tuple[str, ...]] = {
    "Harmony (gpt-oss)": ("<|start|>", "<|channel|>"),
    "Gemma 4": ("<|tool_call>",),
    "FunctionGemma": ("<start_function_call>",),
    "DeepSeek V3.2": ("｜DSML｜",),
    "DeepSeek": ("<｜tool▁calls▁begin｜>",),
    "Kimi K2": ("<|tool_calls_section_begin|>",),
    "MiniMax": ("<minimax:tool_call>",),
    "GLM": ("<arg_key>",),
    "LFM2": ("<|tool_call_start|>",),
    "LFM2, older": ("<|tool_list_start|>",),
    "functools": ("functools",),
    "Python calls (Llama 4)": ("func_name1(",),
    "Nemotron Nano 2": ("<TOOLCALL>",),
}


def form_of(name: str) -> ChatFormat:
    """Returns the format of this name; one without calls for "none"."""
    return BY_NAME.get(name, PLAIN)


def choose(template: str) -> tuple[str, str | None]:
    """Returns the name of the format for a chat template, and a warning if the template has a format of calls
    that is not read."""
    for family, marks in UNREAD.items():
        if all(mark in template for mark in marks):
            return DEFAULT, f"the chat template has tool calls in the form of {family}, which no parser reads"
    for form in FORMATS:
        if form.is_of(template):
            return form.name, None
    if TOOLS.search(template):
        return (
            DEFAULT,
            f"the chat template shows tools and names no form of calls that is known ({DEFAULT} is read)",
        )
    return DEFAULT, None


def choose_thoughts(template: str) -> str:
    """Returns the name of the reasoning format for a chat template, or "none"."""
    for thoughts in THOUGHTS:
        if any(sign in template for sign in thoughts.signs):
            return thoughts.name
    return "none"
