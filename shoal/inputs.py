"""The types of the dicts that `LLM` takes as prompts, with vLLM's names, for users who check types."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. Requests share cached blocks only if they have the same `cache_salt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is the text that they came from, if it should be in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
