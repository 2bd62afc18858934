"""The prompts that `LLM` takes as dicts, with vLLM's names, for those who check types."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text; requests share cached blocks only under one `cache_salt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and the text they came from where somebody wants to see it in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
