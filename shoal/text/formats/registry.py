"""Formats of tool calls with a parser, and marks of formats without one."""

from __future__ import annotations

import re

from shoal.text.formats import granite, hermes, llama3_json, mistral, qwen3_coder
from shoal.text.formats.tool_format import ToolFormat

# In this order, as some marks contain others: the first format in a template is the model's.
FORMATS: tuple[ToolFormat, ...] = (
    qwen3_coder.FORMAT,
    mistral.FORMAT,
    granite.FORMAT,
    hermes.FORMAT,
    llama3_json.FORMAT,
)
BY_NAME = {form.name: form for form in FORMATS}
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


def choose(template: str) -> tuple[str, str | None]:
    """Returns the name of the parser for a chat template, and a warning if the template has a format of calls
    without a parser."""
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
