"""Turns an engine's `Output`s into text: one answer as it grows. `LLM` and the server use it;
request_builder.py makes the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.api import FinishReason, Output, Request, TokenLogprobs
from shoal.outputs import CompletionOutput
from shoal.text.detokenizer import Detokenizer, add_texts
from shoal.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """The new part of one answer. The last delta of an answer has a finish_reason."""

    index: int  # prompt number * n + answer number
    text: str  # "" without a tokenizer or with detokenize=False
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one entry per token, with texts
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None
    embedding: list[float] | None = None


class Answer:
    """The answer to one request. It keeps only the state that the next tokens need; the reader keeps the text
    and the tokens so far.

    tokenizer: None for an answer without text. If the request has `output_token_ids`, the first new text
    follows their text.
    """

    __slots__ = (
        "_may_stop",
        "detokenizer",
        "finish_reason",
        "num_cached_tokens",
        "prompt_logprobs",
        "request",
        "tokenizer",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.tokenizer = tokenizer if request.params.detokenize else None
        self.detokenizer: Detokenizer | None = None
        self._may_stop = bool(request.params.stop)
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_cached_tokens = 0
        if self.tokenizer is not None and not request.embed:
            self.detokenizer = Detokenizer(self.tokenizer, request.params, request.prompt_token_ids)
            if request.output_token_ids:
                self.detokenizer.push(request.output_token_ids)

    def push(self, output: Output) -> str:
        """Takes the next output; returns the text that it adds. Its log-probabilities get texts.

        A stop string ends the answer, even if the engine continues: `output` is cut after the token that
        completes the string, and gets its finish reason. The engine sampled further tokens only because it
        does not know stop strings; their number depends on how steps were merged. Not to be called after the
        end.
        """
        text, stop = "", None
        ids, ends = output.token_ids, output.finish_reason is not None
        if self.detokenizer is not None:
            if self._may_stop and len(ids) > 1:
                text, stop = self._cut(output, self.detokenizer)
            else:
                drops_last = ends and output.finish_reason == FinishReason.STOP
                text, stop = self.detokenizer.push(ids, last=ends, drop_last=drops_last)
            if stop is not None:
                output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None:
            self._add_texts(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
            self._add_texts(output.prompt_logprobs)
        self.finish_reason = output.finish_reason
        return text

    def _cut(self, output: Output, detokenizer: Detokenizer) -> tuple[str, str | None]:
        """Returns the text of several tokens and the stop string that ends it. Takes the tokens one by one,
        to find the token that completes the string, and cuts `output` after it."""
        ids, text, stop = output.token_ids, "", None
        ends, stopped = output.finish_reason is not None, output.finish_reason == FinishReason.STOP
        count = 0
        while stop is None and count < len(ids):
            is_last = count == len(ids) - 1
            piece, stop = detokenizer.push(
                ids[count : count + 1], last=ends and is_last, drop_last=stopped and is_last
            )
            text += piece
            count += 1
        output.token_ids = ids[:count]
        output.logprobs = None if output.logprobs is None else output.logprobs[:count]
        if output.drafted is not None:
            output.drafted.places = output.drafted.places[:count]
        return text, stop

    def _add_texts(self, steps: Sequence[TokenLogprobs | None]) -> None:
        if self.tokenizer is not None:
            for step in steps:
                if step:
                    add_texts(step, self.tokenizer)


def add_to(whole: CompletionOutput, part: Output | Delta, text: str) -> None:
    """Adds the new part of an answer, and its `text`."""
    whole.token_ids.extend(part.token_ids)
    whole.text += text
    if whole.logprobs is not None:
        for token_id, step in zip(part.token_ids, part.logprobs or ()):
            whole.logprobs.append(step)
            if whole.cumulative_logprob is not None:
                whole.cumulative_logprob += step[token_id].logprob
    if part.finish_reason is not None:
        whole.finish_reason, whole.stop_reason = str(part.finish_reason), part.stop_reason
