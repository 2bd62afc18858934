"""`ExternalStream`: joins the streams of several workers into one stream of chunks for a client. forwarder.py
decides when a stream continues on another worker, and brings each worker's events (sse.py).

The first worker gets the client's request, and its chunks are passed on without the fields that only the
router requested. If its stream breaks, another worker gets the prompt and the tokens sent so far as a
completion, and its chunks are converted to the form of the first worker's.

Tokens without text, such as half a character, wait for the chunk that shows them; they are lost with their
worker and generated again. Text that a worker withheld as it may begin a stop string is owed to the client
and goes out before the next worker's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.errors import WorkerFailedError
from shoal.fleet.external.request import ExternalRequest

DONE = b"data: [DONE]\n\n"
MOST_HELD = 1 << 16  # limit of consecutive chunks without text
MOST_TOKENS = 1 << 32  # limit of a plausible token count of one request
Chunk = dict[str, Any]
decode = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class TokenCounts:
    """Numbers of prompt tokens, cached prompt tokens and generated tokens."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> TokenCounts:
        """Reads the usage of an answer, in OpenAI's form. An implausible value counts as 0."""
        found = _count(usage.get("prompt_tokens")), _cached(usage), _count(usage.get("completion_tokens"))
        return cls(*[count or 0 for count in found])

    def add(self, other: TokenCounts) -> None:
        self.prompt += other.prompt
        self.cached += other.cached
        self.generated += other.generated


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else None


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def reasons_of(choices: Any) -> set[str]:
    """Returns the finish reasons of an answer's or a chunk's choices; empty if they continue or if `choices`
    is malformed."""
    found = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return {str(choice["finish_reason"]) for choice in found if choice.get("finish_reason") is not None}


class ExternalStream:
    """One client's stream of chunks: what was sent, and what the next worker must continue from."""

    def __init__(self, request: ExternalRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []  # output sent to the client
        self.prompt_ids: list[int] | None = None  # None: not reported by the worker yet
        self.has_begun = False  # the client has received something
        self.is_done = False
        self.has_finished = False  # the reason why the answer ends is known
        self.finish_reasons: set[str] = set()  # reasons of all choices
        self.is_stopped = False  # by a stop string that spans two workers' text
        # Cached and all prompt tokens, as reported by the first worker.
        self.cached_tokens: tuple[int, int] | None = None
        self._head: Chunk = {}  # fields that all chunks share
        # Chunks that show nothing yet, and the end, which goes out at once. Bytes are unchanged.
        self._held: list[Chunk | bytes] = []
        self._num_given = 0  # output tokens that the present worker got with its prompt
        self._texts: list[str] = []  # sent
        self._begun_at = 0  # characters that were sent before the present worker
        self._owed = ""  # text of the sent tokens that a worker withheld
        self._lacks_ids = False  # text was sent without known token ids
        self._is_reasoning = False  # the last text sent was reasoning
        self._usage: Chunk | None = None
        self._num_tokens = 0  # received, as far as known

    def push(self, data: bytes) -> tuple[bytes, int]:
        """Takes the data of a worker's event. Returns the events for the client and the number of tokens in
        the data. Raises WorkerFailedError for data that shows a failure of the worker."""
        try:
            events, num_tokens = self._take(data)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise WorkerFailedError(f"a worker's stream has a malformed event: {error!r:.300}") from None
        if len(self._held) > MOST_HELD:
            raise WorkerFailedError(
                f"a worker's stream has more than {MOST_HELD} consecutive chunks without text"
            )
        self.has_begun = self.has_begun or bool(events)
        self._num_tokens += num_tokens
        return events, num_tokens

    def _take(self, data: bytes) -> tuple[bytes, int]:
        if data == b"[DONE]":
            return self._end(), 0
        chunk = decode(data)
        if "error" in chunk or chunk.get("object") == "error":
            return self._pass_error(chunk, data)
        choices = chunk.get("choices") or []
        if self.request.blocked_reason is not None:
            self._held.append(data)
            if isinstance(chunk.get("usage"), dict):
                self._usage = chunk["usage"]
            reasons = reasons_of(choices)
            self.has_finished = bool(reasons)
            self.finish_reasons |= reasons
            shows = self.has_begun or self.has_finished or any(map(self._shows_something, choices))
            return self._release() if shows else b"", len(choices)
        if not choices:
            self._take_usage(chunk)
            return b"", 0
        return self._take_choice(chunk, choices[0])

    @property
    def num_tokens_left(self) -> int | None:
        """Tokens until the limit; None: up to the model's length."""
        most = self.request.max_tokens
        return None if most is None else most - len(self.token_ids)

    def blocked_reason(self) -> str | None:
        """Returns why the stream cannot continue on another worker; None if it can."""
        if self.request.blocked_reason is not None:
            return f"{self.request.blocked_reason} cannot continue on another worker"
        if self._lacks_ids or self.prompt_ids is None:
            return (
                "the worker's stream has no token ids (return_token_ids), which another worker needs to "
                "continue it"
            )
        if self._is_reasoning:
            return "it was in the middle of its reasoning, which cannot continue on another worker"
        return None

    @property
    def counts(self) -> TokenCounts:
        """The workers' report of usage, or the counts of the chunks without one."""
        if self._usage is not None:
            return TokenCounts.of(self._usage)
        return TokenCounts(prompt=len(self.prompt_ids or ()), generated=self._num_tokens)

    @property
    def text(self) -> str:
        """The output text sent so far."""
        return "".join(self._texts)

    def break_off(self) -> None:
        """Drops the chunks of a failed worker that the client has not seen, unless only the end is
        missing."""
        if self.is_whole:
            return
        self._held.clear()
        self._owed = ""
        if not self.has_begun:
            self._head, self.prompt_ids, self.has_finished = {}, None, False
            self.finish_reasons.clear()

    def keep(self, num_tokens: int, owed: str) -> None:
        """Keeps the first `num_tokens` output tokens. `owed`: the end of their text, which was not sent."""
        del self.token_ids[num_tokens:]
        self._owed = owed

    def continuation(self) -> list[int]:
        """Prepares for another worker. Returns its prompt: the prompt's tokens and the output so far."""
        self._num_given, self._begun_at = len(self.token_ids), len(self.text)
        return [*(self.prompt_ids or ()), *self.token_ids]

    def finish(self) -> bytes:
        """Returns the end of a stream whose answer is whole but whose worker did not send the end."""
        events = self._release()
        if not self.has_finished:
            text = self._owed
            shown: Chunk = (
                {"delta": {"content": text} if text else {}} if self.request.is_chat else {"text": text}
            )
            choice = {"index": 0, **shown, "logprobs": None, "finish_reason": "length"}
            events += self._encode({**self._head, "choices": [choice]})
            self.finish_reasons.add("length")
        if self.request.wants_usage and self._usage is None and self.prompt_ids is not None:
            given, done = len(self.prompt_ids), len(self.token_ids)
            usage = {"prompt_tokens": given, "completion_tokens": done, "total_tokens": given + done}
            events += self._encode({**self._head, "choices": [], "usage": usage})
        return events + self._end()

    @property
    def is_whole(self) -> bool:
        """True if the answer is complete and only the end of the stream is missing."""
        if not self.has_begun or self.request.blocked_reason is not None:
            return False
        return self.has_finished or (self.num_tokens_left == 0 and not self._lacks_ids)

    def _end(self) -> bytes:
        self.is_done = True
        return self._release() + DONE

    def _release(self) -> bytes:
        """Returns the events of the held chunks."""
        events = [one if isinstance(one, bytes) else self._show(one) for one in self._held]
        self._held.clear()
        return b"".join([b"data: %b\n\n" % event for event in events])

    def _pass_error(self, chunk: Chunk, data: bytes) -> tuple[bytes, int]:
        """Passes an error about the request to the client. Raises WorkerFailedError for any other error."""
        error = chunk.get("error")
        about = error if isinstance(error, dict) else chunk
        code = about.get("code")
        if isinstance(code, int) and 400 <= code < 500:
            self._held.append(data)
            return self._end(), 0
        raise WorkerFailedError(f"a worker ended a stream with an error: {about.get('message')!r:.500}")

    def _take_usage(self, chunk: Chunk) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            chunk["usage"] = self._usage = self._whole_usage(usage)
        if self.request.wants_usage or not isinstance(usage, dict):
            self._held.append(encode({**chunk, **self._head}))

    def _take_choice(self, chunk: Chunk, choice: Chunk) -> tuple[bytes, int]:
        _check(choice)
        prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt_ids and self.prompt_ids is None:
            self.prompt_ids = prompt_ids
        if isinstance(chunk.get("usage"), dict):
            chunk["usage"] = self._whole_usage(chunk["usage"])
        if self._num_given:
            self._reshape(choice)
        if not self._head:
            self._head = {
                name: value
                for name, value in chunk.items()
                if name not in ("choices", "usage", "prompt_token_ids", "prompt_logprobs")
            }
        self._held.append(chunk)
        num_tokens = len(choice.get("token_ids") or ())
        if self.is_stopped:
            return self.finish(), num_tokens
        if reasons := reasons_of([choice]):
            self.has_finished = True
            self.finish_reasons |= reasons
            return b"", num_tokens
        if not self._shows_something(choice):
            return b"", num_tokens
        return self._release(), num_tokens or 1

    def _reshape(self, choice: Chunk) -> None:
        """Converts the choice of a completion's chunk to the form of the first worker's chunks."""
        choice.pop("prompt_logprobs", None)
        if self._owed:
            self._pay(choice)
        if self.request.is_chat:
            choice["delta"] = {"content": choice.pop("text", "")}
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [offset + self._begun_at for offset in logprobs["text_offset"]]

    def _pay(self, choice: Chunk) -> None:
        """Prepends the owed text to the choice's. Finds a stop string that begins in the owed text, which the
        present worker cannot see as it did not write its beginning."""
        text, stops = self._owed + (choice.get("text") or ""), self.request.stops
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        may_begin = any(stop.startswith(text[at:]) for stop in stops for at in range(len(self._owed)))
        if found:
            at, stop = min(found)
            keeps_stop = bool(self.request.get("include_stop_str_in_output"))
            choice["text"] = text[: at + len(stop)] if keeps_stop else text[:at]
            choice["finish_reason"], choice["stop_reason"] = "stop", stop
            self.is_stopped = self.has_finished = True
            self.finish_reasons.add("stop")
        elif may_begin and choice.get("finish_reason") is None:
            choice["text"], self._owed = "", text
            return
        else:
            choice["text"] = text
        self._owed = ""

    def _shows_something(self, choice: Chunk) -> bool:
        if not self.request.is_chat:
            return bool(choice.get("text"))
        delta = choice.get("delta") or {}
        return any(value for name, value in delta.items() if name != "role")

    def _show(self, chunk: Chunk) -> bytes:
        choice = chunk["choices"][0]
        ids = choice.get("token_ids")
        if self.request.is_chat:
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            thoughts = delta.get("reasoning") or delta.get("reasoning_content")
            self._is_reasoning = bool(thoughts) or (self._is_reasoning and not text)
        else:
            text, thoughts = choice.get("text") or "", None
        if ids:
            self.token_ids += ids
        elif text or thoughts:
            self._lacks_ids = True
        self._texts.append(text)
        if not self.request.wants_token_ids:
            choice.pop("token_ids", None)
        if self._num_given or not self.request.wants_token_ids:
            choice.pop("prompt_token_ids", None)
            chunk.pop("prompt_token_ids", None)
        if not self.request.wants_usage:
            chunk.pop("usage", None)
        return encode({**chunk, **self._head} if self._num_given else chunk)

    def _whole_usage(self, usage: Chunk) -> Chunk:
        """Converts the present worker's usage to the usage that a single worker would report."""
        given, cached = self._num_given, _cached(usage)
        prompt, generated = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if prompt is None:
            return usage
        if not given:
            self.cached_tokens = (cached, prompt) if cached is not None else None
            return usage
        prompt = max(0, prompt - given)
        whole = {**usage, "prompt_tokens": prompt}
        if generated is not None:
            whole["completion_tokens"] = generated + given
        if cached is not None:
            details = usage["prompt_tokens_details"]
            whole["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, prompt)}
        return whole

    @staticmethod
    def _encode(chunk: Chunk) -> bytes:
        return b"data: %b\n\n" % encode(chunk)


def _check(choice: Chunk) -> None:
    """Raises TypeError for a malformed choice, before any part of it is counted."""
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), delta.get("content"))
    ids = choice.get("token_ids") or []
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(ids, list):
        raise TypeError(f"a choice is {choice!r:.200}")
    if not all(type(one) is int for one in ids):
        raise TypeError(f"token_ids are {ids!r:.200}")
