"""`ExternalStream`: one stream of chunks for a client, out of the streams of several workers.

The first worker answers the request as it came, and its chunks are passed on without what the client did not
ask for. When its stream breaks off, another worker is given the prompt and the tokens so far as a completion,
and its chunks are put into the shape of the first worker's.

"So far" is what the client was sent. Tokens without text, such as half a character, wait for the chunk that
shows them; they are lost with their worker and generated again. Where a worker held back text that may begin
a stop string, the client is owed it: it goes out before the next worker's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.errors import WorkerFailedError
from shoal.fleet.external.request import ExternalRequest

DONE = b"data: [DONE]\n\n"
MOST_HELD = 1 << 16  # chunks in succession that show nothing
MOST_TOKENS = 1 << 32  # that a worker is believed to have had in one request
Chunk = dict[str, Any]
decode = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class TokenCounts:
    """Tokens of prompts, those of them that a worker had cached, and tokens generated."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> TokenCounts:
        """By what an answer says in OpenAI's form. What is no number of tokens counts as none."""
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
    """Why the choices of an answer or a chunk end; those that go on say nothing, and what is no list of
    choices has none."""
    found = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return {str(choice["finish_reason"]) for choice in found if choice.get("finish_reason") is not None}


class ExternalStream:
    def __init__(self, request: ExternalRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []  # of the output, as far as the client was sent it
        self.prompt_ids: list[int] | None = None  # None: the worker has not told them
        self.has_begun = False  # the client was sent something
        self.is_done = False
        self.has_finished = False  # the reason why the answer ends is known
        self.finish_reasons: set[str] = set()  # of all answers in it
        self.is_stopped = False  # by a stop string that two workers wrote
        # Tokens of the prompt that the first worker had cached, and all of them, as it said.
        self.cached_tokens: tuple[int, int] | None = None
        self._head: Chunk = {}  # what all chunks have in common
        # Chunks that show nothing yet, and the end, which goes out at once. Bytes are as they came.
        self._held: list[Chunk | bytes] = []
        self._num_given = 0  # tokens of output that the present worker got with its prompt
        self._texts: list[str] = []  # sent
        self._begun_at = 0  # characters that were sent before the present worker
        self._owed = ""  # text of the tokens so far that was not sent
        self._lacks_ids = False  # something was sent whose token ids are not known
        self._is_reasoning = False  # the last that was sent are thoughts, not the answer
        self._usage: Chunk | None = None
        self._num_tokens = 0  # that came, as far as they can be told

    def push(self, data: bytes) -> tuple[bytes, int]:
        """The data of a worker's event. Returns what the client gets of it, and the number of its tokens.
        Raises WorkerFailedError for what shows that the worker has failed."""
        try:
            events, num_tokens = self._take(data)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise WorkerFailedError(
                f"a worker's stream has an event of no known shape: {error!r:.300}"
            ) from None
        if len(self._held) > MOST_HELD:
            raise WorkerFailedError(f"a worker's stream has more than {MOST_HELD} chunks that show nothing")
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
        if self.request.obstacle is not None:
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
        """How many tokens may still come; None: as many as fit."""
        most = self.request.max_tokens
        return None if most is None else most - len(self.token_ids)

    def obstacle(self) -> str | None:
        """Why the stream cannot go on at another worker; None if it can."""
        if self.request.obstacle is not None:
            return f"{self.request.obstacle} cannot be taken up by another worker"
        if self._lacks_ids or self.prompt_ids is None:
            return (
                "the worker's stream has no token ids (return_token_ids), without which no other worker can "
                "take it up"
            )
        if self._is_reasoning:
            return "it was in the middle of its reasoning, which cannot be taken up by another worker"
        return None

    @property
    def counts(self) -> TokenCounts:
        """As the workers said; where they did not, as far as it could be seen."""
        if self._usage is not None:
            return TokenCounts.of(self._usage)
        return TokenCounts(prompt=len(self.prompt_ids or ()), generated=self._num_tokens)

    @property
    def text(self) -> str:
        """The text of the output, as far as it was sent."""
        return "".join(self._texts)

    def break_off(self) -> None:
        """The worker is lost, and with it what it sent and the client was not shown, but for the end."""
        if self.is_whole:
            return
        self._held.clear()
        self._owed = ""
        if not self.has_begun:
            self._head, self.prompt_ids, self.has_finished = {}, None, False
            self.finish_reasons.clear()

    def settle(self, num_tokens: int, owed: str) -> None:
        """So many of the tokens so far count, and this is the end of their text, which was not sent."""
        del self.token_ids[num_tokens:]
        self._owed = owed

    def go_on(self) -> list[int]:
        """Another worker is given the tokens so far, which are returned with those of the prompt."""
        self._num_given, self._begun_at = len(self.token_ids), len(self.text)
        return [*(self.prompt_ids or ()), *self.token_ids]

    def finish(self) -> bytes:
        """The end of a stream whose answer is whole. Its worker did not send it, or was lost before."""
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
        """Whether the answer is, and only the end of the stream is missing."""
        if not self.has_begun or self.request.obstacle is not None:
            return False
        return self.has_finished or (self.num_tokens_left == 0 and not self._lacks_ids)

    def _end(self) -> bytes:
        self.is_done = True
        return self._release() + DONE

    def _release(self) -> bytes:
        """What the client gets of the chunks that were held back."""
        events = [one if isinstance(one, bytes) else self._show(one) for one in self._held]
        self._held.clear()
        return b"".join([b"data: %b\n\n" % event for event in events])

    def _pass_error(self, chunk: Chunk, data: bytes) -> tuple[bytes, int]:
        """An error of the request is the client's; any other is the worker's."""
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
        """The choice of a completion's chunk becomes one of the first worker's."""
        choice.pop("prompt_logprobs", None)
        if self._owed:
            self._pay(choice)
        if self.request.is_chat:
            choice["delta"] = {"content": choice.pop("text", "")}
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [offset + self._begun_at for offset in logprobs["text_offset"]]

    def _pay(self, choice: Chunk) -> None:
        """Puts the text that the client is owed before the choice's. Here a stop string is found that begins
        in it: the present worker did not write its beginning, and cannot see it."""
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
        """What the present worker says of itself, as one worker would have said of all."""
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
    """Raises TypeError for what is no choice of a chunk, before anything of it counts."""
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), delta.get("content"))
    ids = choice.get("token_ids") or []
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(ids, list):
        raise TypeError(f"a choice is {choice!r:.200}")
    if not all(type(one) is int for one in ids):
        raise TypeError(f"token_ids are {ids!r:.200}")
