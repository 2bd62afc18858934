"""The models that answer in `shoal chat`: one in this process, or any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.cli.address import ask, key_header, parts_of
from shoal.cli.sampling_flags import SAMPLING
from shoal.errors import RequestError, ShoalError, UnavailableError

MAX_TOKENS = 1024  # the default for an answer of a local model; a server has its own default
TIMEOUT_SECONDS = 600  # until the next byte: a long prompt may be computed meanwhile
OLLAMA_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
REFUSALS = (400, 413, 422)

Message = dict[str, str]
Settings = dict[str, Any]


class ContextFullError(RequestError):
    """Raised for a conversation that does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A new part of an answer. The last one has a finish_reason, and num_tokens where it is known."""

    text: str = ""
    thought: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None


class Speaker(Protocol):
    """A model to talk with. `context_len`: None if unknown. `max_tokens` limits an answer, if no setting
    does; None if the server decides."""

    name: str
    place: str
    context_len: int | None
    max_tokens: int | None

    def defaults(self) -> Settings:
        """Returns the default values of settings, as far as they are known."""

    def models(self) -> list[str]:
        """Returns the names of available models, for `use`. Raises ShoalError."""

    def use(self, name: str) -> None:
        """Changes the model. Raises ShoalError if that fails; then, and after a KeyboardInterrupt, the former
        model stays."""

    def count(self, messages: Sequence[Message]) -> int | None:
        """Returns the number of tokens of a conversation; None if unknown."""

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]:
        """Yields the answer. Closing the generator, or a KeyboardInterrupt from it, ends the request.

        Raises ContextFullError before the first piece, and ShoalError for other failures.
        """


class LocalSpeaker:
    """A model in this process. As long as old turns can be dropped, it reserves room for an answer:
    `max_tokens` or a quarter of the context, whichever is less.

    llm: closed by `close`, or when the model changes. build: loads the model of a name.
    """

    def __init__(self, llm: Any, build: Callable[[str], Any] | None = None) -> None:
        self._build = build
        self.max_tokens: int | None = MAX_TOKENS
        self._take(llm)

    def _take(self, llm: Any) -> None:
        self._llm = llm
        self.name, self.place = llm.config.model, f"on this machine ({llm.config.device})"
        self._limit = min(llm.config.max_model_len, llm.core.kv_cache_tokens)
        self.context_len: int | None = self._limit

    def close(self) -> None:
        self._llm.exit()

    def defaults(self) -> Settings:
        params = self._llm.get_default_sampling_params()
        return {name: getattr(params, name) for name in SAMPLING} | {"max_tokens": self.max_tokens}

    def models(self) -> list[str]:
        from shoal.cli.models import cached_models

        found = [
            model.name
            for model in cached_models(self._llm.config.download_dir)
            if model.is_downloaded and model.is_whole
        ]
        return found if self.name in found else [self.name, *found]

    def use(self, name: str) -> None:
        from shoal.weights.source import resolve

        assert self._build is not None
        # A wrong name, or an unsupported model, must not end the current model.
        resolve(name, None, self._llm.config.download_dir).check()
        former = self.name
        self.close()  # The memory may not hold both.
        try:
            self._take(self._build(name))
        except BaseException:
            self._take(self._build(former))
            raise

    def count(self, messages: Sequence[Message]) -> int | None:
        return len(self._llm.chat_prompt(messages)["prompt_token_ids"])

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]:
        params = self._llm.get_default_sampling_params()
        params = dataclasses.replace(params, **{"max_tokens": self.max_tokens, **settings})
        prompt = self._llm.chat_prompt(messages)
        count, limit = len(prompt["prompt_token_ids"]), self._limit
        has_old_turns = sum(message["role"] != "system" for message in messages) > 1
        if count + (min(params.max_tokens, limit // 4) if has_old_turns else 1) > limit:
            raise ContextFullError(
                f"this message has {count} tokens, with the system message and the chat template, and the "
                f"context has {limit}; shorten it"
            )
        shown = 0
        for output in self._llm.stream(prompt, params):
            answer = output.outputs[0]
            yield Piece(answer.text[shown:], "", len(answer.token_ids), answer.finish_reason)
            shown = len(answer.text)


class RemoteSpeaker:
    """An OpenAI-compatible server. Only the server knows its context length, so it checks each conversation.

    url: with or without /v1. model: by default the first one that the server lists.
    Raises ConfigError for an impossible URL or key, UnavailableError if the server cannot be reached or
    refuses the request.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._base = url.rstrip("/") + ("" if parts_of(url).path.strip("/") else "/v1")
        self._headers = {"Content-Type": "application/json", **key_header(api_key)}
        listed = self._listed_models(is_needed=model is None)
        self.place = f"at {self._base}"
        self.max_tokens: int | None = None
        self._take(model or listed[0]["id"], listed)

    def _take(self, name: str, listed: list[dict[str, Any]]) -> None:
        entry = next((m for m in listed if m.get("id") == name), {})
        self.name = name
        self._owner = entry.get("owned_by")
        self.context_len: int | None = entry.get("max_model_len") or entry.get("context_length")
        self._asked: list[Message] = []  # the last sent conversation
        self._used: int | None = None  # its tokens and its answer's, counted by the server

    def defaults(self) -> Settings:
        """Returns the defaults by Ollama's API; {} for a server without that API."""
        if self._owner not in ("library", "shoal"):
            return {}
        root = self._base.removesuffix("/v1")
        try:
            with self._open(root + "/api/show", {"model": self.name}) as response:
                lines = json.loads(response.read())["parameters"].splitlines()
        except (
            ShoalError,
            OSError,
            http.client.HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ):
            return {}
        found: Settings = {}
        for line in lines:
            name, _, value = line.partition(" ")
            name = OLLAMA_NAMES.get(name, name)
            if name in SAMPLING:
                with contextlib.suppress(ValueError):
                    found[name] = SAMPLING[name][0](value.strip())
        return found

    def models(self) -> list[str]:
        return [str(model.get("id")) for model in self._listed_models(is_needed=True)]

    def use(self, name: str) -> None:
        listed = self._listed_models(is_needed=False)
        names = [str(model.get("id")) for model in listed]
        if listed and name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"available: {', '.join(names)}"
            raise RequestError(f"model {name!r:.100} not found {self.place}; {hint}")
        self._take(name, listed)

    def _listed_models(self, is_needed: bool) -> list[dict[str, Any]]:
        try:
            with self._open(self._base + "/models") as response:
                listed = json.loads(response.read())["data"]
            if listed or not is_needed:
                return listed
            raise UnavailableError(
                f"the server at {self._base} has no model yet: a router has one when a worker is ready; try "
                "again in a moment, or see `shoal top`"
            )
        except (ValueError, LookupError, TypeError):  # RequestError too: a server without such a list
            if not is_needed:
                return []
        raise UnavailableError(
            f"{self._base}/models must be a list of models; give the address of an OpenAI-compatible server, "
            "and name the model with --model if it has no such list"
        )

    def count(self, messages: Sequence[Message]) -> int | None:
        return self._used if messages[:-1] == self._asked else None

    def answer(self, messages: Sequence[Message], settings: Settings) -> Generator[Piece, None, None]:
        body = {
            "model": self.name,
            "messages": messages,
            **settings,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reason, usage = None, None
        try:
            with self._open(self._base + "/chat/completions", body) as response:
                for line in response:
                    if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                        continue
                    chunk = json.loads(data)
                    if error := chunk.get("error"):
                        raise UnavailableError(f"the server broke off: {_message(error)}")
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or ():
                        delta = choice.get("delta") or {}
                        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        yield Piece(delta.get("content") or "", thought)
                        reason = choice.get("finish_reason") or reason
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            why = f"{type(error).__name__}: {error}"
            raise UnavailableError(f"the answer of {self._base} broke off: {why}") from None
        if reason is None:
            raise UnavailableError(f"the answer of {self._base} ended in the middle; its log may say why")
        if usage is not None:
            self._asked, self._used = list(messages), usage["prompt_tokens"] + usage["completion_tokens"]
        yield Piece(num_tokens=None if usage is None else usage["completion_tokens"], finish_reason=reason)

    def _open(self, url: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        try:
            return ask(request, TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(
                f"no server answers at {self._base} ({reason}); is it up? `shoal serve` starts one"
            ) from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        """Returns the exception for an answer that is an error."""
        text = error.read(1 << 16).decode(errors="replace")
        with contextlib.suppress(ValueError, AttributeError):
            content = json.loads(text)
            text = _message(content.get("error", content))
        if error.code in (401, 403):
            return UnavailableError(
                f"the server wants a key ({error.code}: {text:.300}); give --api-key, or "
                "set SHOAL_API_KEY or OPENAI_API_KEY"
            )
        if error.code in REFUSALS and "context" in text.lower():
            return ContextFullError(text[:300])
        if error.code < 500 and error.code != 429:
            return RequestError(f"the server refused ({error.code}): {text:.300}")
        return UnavailableError(f"the server cannot answer now ({error.code}): {text:.300}")


def _message(error: Any) -> str:
    """Returns the message of an error object of any shape."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
