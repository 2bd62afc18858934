"""Pieces of answers that chat and completions share: usage, log-probabilities, and the chunks of streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from shoal.api import Logprob, TokenLogprobs
from shoal.outputs import CompletionOutput
from shoal.server.apis.protocol import StreamOptions
from shoal.server.http.exchange import DONE
from shoal.server.served.generation import Usage
from shoal.server.served.model import ServedModel
from shoal.text.answer import Delta

encode = msgspec.json.Encoder().encode
# Fields that vLLM's whole answers and messages always have, and that mean nothing here. Programs read them
# without a look whether they are there.
ABSENT_FROM_ANSWERS = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
ABSENT_FROM_MESSAGES = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "reasoning": None,
}
LOWEST = -9999.0  # in place of minus infinity, which JSON does not have; as vLLM


def usage_dict(usage: Usage, num_sent: int | None = None) -> dict[str, Any]:
    """num_sent: the tokens of answers that count. None: all that there are."""
    num_completed = usage.completion_tokens if num_sent is None else num_sent
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + num_completed,
        "completion_tokens": num_completed,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.drafted is not None:
        verified, accepted = usage.drafted
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": verified - accepted,
        }
    return found


class TextPlace:
    """The offset in characters at which the next token begins. Tokens that share a character have its
    offset."""

    def __init__(self, errors: str = "replace") -> None:
        """errors: how the tokenizer shows invalid UTF-8."""
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def move(self, data: bytes) -> None:
        self.offset += len(self._decoder.decode(data))


def is_ended_by_token(answer: Delta | CompletionOutput) -> bool:
    """Returns whether the last token ended the answer, so that the text lacks it."""
    return answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)


class LogprobShapes:
    """Shapes log-probabilities for chat and for completions, each token with the `count` most likely ones."""

    def __init__(self, model: ServedModel, count: int, as_ids: bool) -> None:
        self.model, self.count, self.as_ids = model, count, as_ids

    def name(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self.as_ids or entry.decoded_token is None else entry.decoded_token

    def chat(self, token_ids: Sequence[int], steps: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for token_id, step in zip(token_ids, steps):
            content.append(
                {
                    **self._entry(token_id, step[token_id]),
                    "top_logprobs": [self._entry(i, e) for i, e in self._best(step)],
                }
            )
        return {"content": content}

    def of_text(self, answer: Delta | CompletionOutput) -> list[dict[str, Any]]:
        """Returns the entries of the tokens that an answer's text was made of: not of the one that ended
        it."""
        rows = self.chat(answer.token_ids, answer.logprobs or ())["content"]
        return rows[:-1] if is_ended_by_token(answer) else rows

    def completion(
        self,
        token_ids: Sequence[int],
        steps: Sequence[TokenLogprobs | None],
        spelt: Sequence[bytes],
        place: TextPlace,
    ) -> dict[str, Any]:
        """spelt: what each token adds to the text. place: of the first of them in the text. It is moved
        to the end of the last one."""
        shown: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, step, data in zip(token_ids, steps, spelt):
            own = step[token_id] if step else Logprob(0.0, decoded_token=self._text(token_id))
            name = self.name(token_id, own)
            shown["text_offset"].append(place.offset)
            shown["tokens"].append(name)
            shown["token_logprobs"].append(max(own.logprob, LOWEST) if step else None)
            shown["top_logprobs"].append(self._by_name(token_id, step) if step else None)
            place.move(data)
        return shown

    def _by_name(self, token_id: int, step: TokenLogprobs) -> dict[str, float]:
        """Among tokens with one text (parts of characters are all U+FFFD) the sampled one is shown, else the
        likeliest."""
        shown: dict[str, float] = {}
        for i, entry in [(token_id, step[token_id]), *self._best(step)]:
            shown.setdefault(self.name(i, entry), max(entry.logprob, LOWEST))
        return shown

    def _best(self, step: TokenLogprobs) -> list[tuple[int, Logprob]]:
        """The most likely tokens, best first."""
        count = len(step) if self.count < 0 else self.count
        return list(islice(sorted(step.items(), key=lambda item: -item[1].logprob), count))

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        tokenizer = self.model.loaded.tokenizer
        return {
            "token": self.name(token_id, entry),
            "logprob": max(entry.logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes[token_id]) if tokenizer is not None else None,
        }

    def _text(self, token_id: int) -> str | None:
        return (
            self.model.loaded.tokenizer.token_text(token_id)
            if self.model.loaded.tokenizer is not None
            else None
        )


def prompt_logprobs_list(steps: Sequence[TokenLogprobs | None] | None) -> list[Any] | None:
    """vLLM's shape: for each token of the prompt a map from id to its Logprob, None for the first."""
    if steps is None:
        return None
    return [
        None
        if step is None
        else {
            i: {"logprob": max(e.logprob, LOWEST), "rank": e.rank, "decoded_token": e.decoded_token}
            for i, e in step.items()
        }
        for step in steps
    ]


class Chunks:
    """The chunks of one stream. What never changes is serialized once, and what varies is put between."""

    def __init__(
        self, answer_id: str, kind: str, created: int, model: str, options: StreamOptions, usage: Usage
    ) -> None:
        """usage: what `options` have shown, so far or at the end."""
        self.head = (
            b"data: "
            + encode({"id": answer_id, "object": kind, "created": created, "model": model})[:-1]
            + b',"choices":['
        )
        self._usage, self._ends_with_usage = usage, bool(options.include_usage)
        self._shows_usage = self._ends_with_usage and options.continuous_usage_stats
        self.num_sent = 0  # tokens of answers up to the next chunk, which the caller counts
        self.tail = b'],"usage":null}\n\n' if self._ends_with_usage else b"]}\n\n"

    def chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """`choice`: JSON of the one choice. `more`: JSON members of the chunk itself, each after a comma."""
        if self._shows_usage:
            return (
                self.head
                + choice
                + b"]"
                + more
                + b',"usage":'
                + encode(usage_dict(self._usage, self.num_sent))
                + b"}\n\n"
            )
        return self.head + choice + (b"]" + more + self.tail[1:] if more else self.tail)

    def end(self) -> bytes:
        """The end of the stream, with the usage of the whole answer before it if that was asked for."""
        if not self._ends_with_usage:
            return DONE
        return self.head + b'],"usage":' + encode(usage_dict(self._usage)) + b"}\n\n" + DONE
