"""`ExternalRequest`: a client's request as external workers get it: first unchanged, and after a break with
the tokens generated so far. forwarder.py sends it; stream.py has these tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.errors import UnavailableError
from shoal.fleet_api import ExternalCall

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions
# Headers that are forwarded. The client's key is for the router alone.
HEADERS = (b"accept", b"content-type", b"user-agent", b"x-session-id")
# Fields of a chat that a completion lacks or uses in another sense.
CHAT_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "response_format",
        "reasoning_effort",
        "include_reasoning",
        "modalities",
        "mm_processor_kwargs",
        "audio",
    }
)
# Fields without a use once output exists.
BEGIN_FIELDS = frozenset(
    {"prompt", "prompt_logprobs", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"}
)
GRAMMAR_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "structured_outputs",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)


class ExternalRequest:
    """Keeps the body's fields as raw JSON, so that fields which the router does not read are forwarded
    unchanged."""

    def __init__(self, call: ExternalCall) -> None:
        self.call = call
        self.path = call.path.partition("?")[0]
        self._fields: dict[str, msgspec.Raw] = {}
        try:
            self._fields = msgspec.json.decode(call.body or b"{}", type=dict[str, msgspec.Raw])
        except ValueError:
            pass  # multipart or invalid JSON, which the worker judges
        self.is_chat = self.path == CHAT
        # The answer is a stream of OpenAI's chunks, which the router can read.
        self.has_chunks = self.path in (COMPLETIONS, CHAT) and self.get("stream") is True
        options = self.get("stream_options")
        self._stream_options: dict[str, Any] = options if isinstance(options, dict) else {}
        self.wants_usage = bool(self._stream_options.get("include_usage"))
        self.wants_token_ids = bool(self.get("return_token_ids"))
        # Why the answer cannot continue elsewhere after its first token; None: it can.
        self.blocked_reason = self._find_blocked_reason() if self.has_chunks else "an answer of this kind"

    def get(self, name: str) -> Any:
        """Returns a field of the body; None if it is missing or invalid JSON."""
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw)
        except ValueError:
            return None

    def select(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the body's fields with these names."""
        return {name: self.get(name) for name in names if name in self._fields}

    @property
    def model(self) -> str | None:
        name = self.get("model")
        return name if isinstance(name, str) else None

    @property
    def max_tokens(self) -> int | None:
        """Limit of output tokens; None: up to the model's length."""
        found = self.get("max_completion_tokens") if self.is_chat else None
        found = found or self.get("max_tokens")
        if isinstance(found, int):
            return found
        return None if self.is_chat else DEFAULT_MAX_TOKENS

    @property
    def stops(self) -> list[str]:
        """The strings at which the output ends."""
        stop = self.get("stop")
        if isinstance(stop, str):
            stop = [stop]
        return [one for one in stop if isinstance(one, str) and one] if isinstance(stop, list) else []

    def headers(self) -> dict[str, str]:
        """Returns the forwarded headers. A JSON body gets the content type of JSON, as `curl -d` declares a
        form, which vLLM refuses."""
        line = self.call.line
        found = {"X-Request-Id": line.id, **(line.trace_headers or {})}
        for name in HEADERS:
            if name in self.call.headers:
                found[name.decode("ascii")] = self.call.headers[name].decode("latin-1")
        if self._fields:
            found["content-type"] = "application/json"
        return found

    def first_body(self) -> bytes:
        """Returns the body of a stream that may have to continue elsewhere: it also requests token ids and
        usage."""
        options = {**self._stream_options, "include_usage": True}
        return msgspec.json.encode({**self._fields, "return_token_ids": True, "stream_options": options})

    def next_body(self, prompt: Sequence[int], output: Sequence[int], max_model_len: int | None) -> bytes:
        """Returns the body of a completion that continues the answer. `output`: its token ids so far. Raises
        UnavailableError if the limit of the remaining tokens is unknown."""
        left_out = BEGIN_FIELDS | CHAT_FIELDS if self.is_chat else BEGIN_FIELDS
        body: dict[str, Any] = {name: raw for name, raw in self._fields.items() if name not in left_out}
        body["prompt"] = [*prompt, *output]
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens - len(output)
        elif max_model_len is not None:
            body["max_tokens"] = max_model_len - len(prompt) - len(output)
        else:
            raise UnavailableError(
                "the stream broke and cannot continue: the request has no max_tokens, and no worker reports "
                "its max_model_len"
            )
        least = self.get("min_tokens")
        if isinstance(least, int):
            body["min_tokens"] = max(0, least - len(output))
        body["return_token_ids"] = True
        body["stream_options"] = {**self._stream_options, "include_usage": True}
        return msgspec.json.encode(body)

    def _find_blocked_reason(self) -> str | None:
        if (self.get("n") or 1) != 1 or (self.get("best_of") or 1) != 1 or self.get("use_beam_search"):
            return "a request for several answers (n)"
        if any(self.get(name) for name in GRAMMAR_FIELDS):
            return "an answer that follows a grammar"
        shape = self.get("response_format")
        if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
            return "an answer that follows a grammar (response_format)"
        if self.get("prompt_embeds"):
            return "a prompt of embeddings"
        return self._chat_blocked_reason() if self.is_chat else self._completion_blocked_reason()

    def _completion_blocked_reason(self) -> str | None:
        prompt = self.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], list | str):
            return "a request with several prompts"
        if self.get("suffix"):
            return "a text to be filled in (suffix)"
        return "an answer that repeats its prompt (echo)" if self.get("echo") else None

    def _chat_blocked_reason(self) -> str | None:
        has_tools = self.get("tools") or self.get("functions")
        if has_tools and "none" not in (self.get("tool_choice"), self.get("function_call")):
            return "an answer that may call tools"
        if self.get("logprobs"):
            return "a chat with log-probabilities"
        messages = self.get("messages")
        if not isinstance(messages, list) or not all(map(is_text, messages)):
            return "a conversation with images or other parts that are not text"
        return None


def is_text(message: Any) -> bool:
    """Returns True if a message has only text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
