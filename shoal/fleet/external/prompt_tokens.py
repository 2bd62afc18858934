"""`PromptTokens`: tokens of prompts for external workers, for the choice of the worker; they are never sent.
The dispatcher hashes them; forwarder.py forwards the client's own body."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.errors import RequestError
from shoal.fleet.external.link import ExternalLink
from shoal.fleet.external.request import is_text
from shoal.fleet.routing.dispatcher import Dispatcher
from shoal.text.tokenizer import LONG_TEXT, Tokenizer

# Fields of a conversation for `/tokenize`, in addition to its messages.
TEMPLATE_FIELDS = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
PROMPT_FIELDS = ("model", "token_ids", "prompt", "messages", *TEMPLATE_FIELDS)
CONTEXT_TOKENS = 8  # prompt tokens that are decoded before the output: some decoders drop a first space
BYTES_A_NUMBER = 4  # about one token of English
MOST_TEXT_BYTES = 1 << 22  # limit of a text in place of tokens; the rest hardly changes the choice


class PromptTokens:
    """Tokenizes by the operator's tokenizer, or by a worker's /tokenize. Without either, four bytes of text
    stand for a token: equal prefixes have equal numbers, which suffices for the router's predictions but does
    not match workers' KV events."""

    def __init__(self, dispatcher: Dispatcher[ExternalLink], tokenizer: Tokenizer | None) -> None:
        self._dispatcher, self._tokenizer = dispatcher, tokenizer

    async def tokens_of(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Returns the tokens of a request's first prompt. `body` has `token_ids`, `prompt` or `messages`, as
        vLLM's requests. Raises RequestError for a body without any of them."""
        prompt = body.get("token_ids") or body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._text(prompt, body)
        if isinstance(prompt, list):
            return _checked(prompt)
        if isinstance(body.get("messages"), list):
            return await self._messages(body["messages"], body)
        raise RequestError("prompt is missing; give token_ids, prompt or messages", field="prompt")

    async def text_of(self, model: str | None, before: list[int], token_ids: list[int]) -> str | None:
        """Returns the text of output tokens after the end of their prompt; None without a detokenizer."""
        before = before[-CONTEXT_TOKENS:]
        beginning = await self._decode(model, before)
        whole = await self._decode(model, before + token_ids)
        if beginning is None or whole is None or not whole.startswith(beginning):
            return None
        return whole[len(beginning) :]

    async def _decode(self, model: str | None, token_ids: list[int]) -> str | None:
        if self._tokenizer is not None:
            return await asyncio.to_thread(self._tokenizer.decode, token_ids)
        for link in self._links(model):
            if (text := await link.detokenize(model, token_ids)) is not None:
                return text
        return None

    def _links(self, model: str | None) -> list[ExternalLink]:
        """Returns the links of ready workers with this model or adapter, the least busy first."""
        workers = []
        for worker in self._dispatcher.workers.values():
            has_model = model is None or model in worker.info.models or model in worker.info.adapters
            if has_model and worker.takes_requests:
                workers.append(worker)
        return [worker.link for worker in sorted(workers, key=lambda worker: worker.active)]

    async def _text(self, text: str, body: Mapping[str, Any]) -> Sequence[int]:
        adds_special_tokens = body.get("add_special_tokens") is not False
        tokenizer = self._tokenizer
        if tokenizer is not None and len(text) < LONG_TEXT:
            return tokenizer.encode(text, adds_special_tokens)
        if tokenizer is not None:
            return await asyncio.to_thread(tokenizer.encode, text, adds_special_tokens)
        asked = {"prompt": text, "add_special_tokens": adds_special_tokens}
        return await self._ask("prompt", asked, body) or text_numbers(text.encode("utf-8", "surrogatepass"))

    async def _messages(self, messages: list[Any], body: Mapping[str, Any]) -> Sequence[int]:
        given = {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}
        ids = None
        if all(map(is_text, messages)):
            ids = await self._by_template(messages, given) or await self._ask(
                "messages", {"messages": messages, **given}, body
            )
        if ids is not None:
            return ids
        parts = [msgspec.json.encode(given.get("tools"))]
        parts += [msgspec.json.encode(message) for message in messages]
        return text_numbers(b"".join(parts))

    async def _by_template(self, messages: list[Any], given: Mapping[str, Any]) -> list[int] | None:
        """Tokenizes by the operator's tokenizer and its template; None if it cannot. A template in the
        request is left to the worker, as a template is a program."""
        tokenizer = self._tokenizer
        if tokenizer is None or tokenizer.chat_template is None or "chat_template" in given:
            return None
        try:
            return await asyncio.to_thread(_rendered, tokenizer, messages, given)
        except (RequestError, TypeError):  # the worker's template may accept these messages
            return None

    async def _ask(self, form: str, asked: dict[str, Any], body: Mapping[str, Any]) -> list[int] | None:
        """Asks the least busy worker that may have /tokenize."""
        model = body.get("model") if isinstance(body.get("model"), str) else None
        if model is not None:
            asked["model"] = model
        for link in self._links(model):
            if link.may_tokenize(form):
                return await link.tokenize(form, asked)
        return None


def text_numbers(text: bytes) -> array[int]:
    """Returns one number for each four bytes of the text, in place of tokens."""
    text = text[:MOST_TEXT_BYTES]
    numbers = array("I", text[: len(text) // BYTES_A_NUMBER * BYTES_A_NUMBER])
    assert numbers.itemsize == BYTES_A_NUMBER
    return numbers


def _rendered(tokenizer: Tokenizer, messages: list[Any], given: Mapping[str, Any]) -> list[int]:
    variables = given.get("chat_template_kwargs")
    continues = bool(given.get("continue_final_message"))
    return tokenizer.apply_chat_template(
        messages,
        tools=given.get("tools"),
        add_generation_prompt=given.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        **(variables if isinstance(variables, dict) else {}),
    )


def _checked(ids: list[Any]) -> list[int]:
    # Builtins, as a Python loop over a long prompt would take longer than the rest of routing.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 1 << 32):
        raise RequestError(
            "prompt must be a list of token ids, each an integer from 0 to 4294967295", field="prompt"
        )
    return ids
