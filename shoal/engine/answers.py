"""The answers of LLM's requests while they grow: one for each sequence, in groups of one prompt."""

from __future__ import annotations

import dataclasses
import time

from shoal.api import Logprob, Output, Request
from shoal.errors import UnavailableError
from shoal.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from shoal.text.answer import Answer, add_to
from shoal.text.thinking_budget import LimitedRequest, ThinkingBudget
from shoal.text.tokenizer import Tokenizer


class SequenceAnswer:
    """One sequence's answer, with all its outputs so far."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer | None, metrics: RequestMetrics | None
    ) -> None:
        """metrics: where its times go; None: nowhere."""
        self.request, self.metrics = request, metrics
        self._answer = Answer(request, tokenizer)
        wants_logprobs = request.params.logprobs is not None
        self.completion = CompletionOutput(
            index,
            "",
            [],
            cumulative_logprob=0.0 if wants_logprobs else None,
            logprobs=[] if wants_logprobs else None,
        )

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def moves_on(self) -> bool:
        """True if `request` is another one now, which continues the answer."""
        return False

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        return self._answer.prompt_logprobs

    @property
    def num_cached_tokens(self) -> int:
        return self._answer.num_cached_tokens

    def push(self, output: Output) -> str | None:
        """Adds one output. Returns the stop string that ended the answer if the engine does not know of
        it."""
        if self.completion.finish_reason is not None:
            return None
        goes_on = output.finish_reason is None
        add_to(self.completion, output, self._answer.push(output))
        self.completion.error = output.error
        if self.metrics is not None and output.token_ids:
            self.metrics.count(len(output.token_ids), output.queued_seconds, time.monotonic())
        return str(output.stop_reason) if goes_on and output.finish_reason is not None else None


class LimitedAnswer(SequenceAnswer):
    """An answer whose reasoning ends after a number of tokens. `request` is what the engine runs."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics | None,
        budget: ThinkingBudget,
    ) -> None:
        super().__init__(index, request, tokenizer, metrics)
        self._limited = LimitedRequest(budget, request)
        self.moves_on()

    def push(self, output: Output) -> str | None:
        return super().push(self._limited.push(output))

    def moves_on(self) -> bool:
        """True if the budget is spent: then the end of reasoning is added, and `request` is the next one."""
        if self.finished or not self._limited.is_spent:
            return False
        super().push(self._limited.end())
        self.request = self._limited.current
        return True


class EmbeddingAnswer:
    """The embedding of one prompt, once it is there. It is a group of one answer, itself."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output: Output | None = None
        self.answers = [self]

    @property
    def finished(self) -> bool:
        return self.output is not None

    def push(self, output: Output) -> None:
        self.output = output

    def result(self) -> EmbeddingRequestOutput:
        """Raises UnavailableError if the request was ended from outside."""
        output = self.output
        if output is None or output.embedding is None:
            raise UnavailableError(
                f"the embedding of request {self.request.request_id} was aborted; ask again"
            )
        return EmbeddingRequestOutput(
            self.request.request_id.removesuffix("-0"),
            EmbeddingOutput(output.embedding),
            self.request.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )


class AnswerGroup:
    """The `params.n` answers to one prompt."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], answers: list[SequenceAnswer]
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids, self.answers = (
            request_id,
            prompt,
            prompt_token_ids,
            answers,
        )

    @property
    def finished(self) -> bool:
        return all(a.finished for a in self.answers)

    @property
    def progress(self) -> tuple[int, bool]:
        """Changes whenever there is something new to show."""
        return sum(len(a.completion.token_ids) for a in self.answers), self.finished

    def output(self) -> RequestOutput:
        """A snapshot: later steps don't change it."""
        completions = [
            CompletionOutput(
                c.index,
                c.text,
                list(c.token_ids),
                c.cumulative_logprob,
                None if c.logprobs is None else list(c.logprobs),
                c.finish_reason,
                c.stop_reason,
                c.error,
            )
            for c in (a.completion for a in self.answers)
        ]  # `replace` takes twice as long
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            self.answers[0].prompt_logprobs,
            self.answers[0].num_cached_tokens,
            dataclasses.replace(metrics) if (metrics := self.answers[0].metrics) is not None else None,
        )
