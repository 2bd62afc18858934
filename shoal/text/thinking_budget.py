"""`ThinkingBudget`: ends reasoning after a number of tokens. The request is aborted there and continued with
the end of reasoning appended, so that any engine can do it; its outputs are those of one answer."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.api import FinishReason, Logprob, Output, Request
from shoal.text.reading.thoughts import Start, Thoughts
from shoal.text.request_builder import copy_params
from shoal.text.tokenizer import Tokenizer

SPACE = b" \t\r\n"
MOST_OF_CHARACTER = 3  # tokens that may complete a character
CERTAIN = 0.0  # the log-probability of a token that nothing else could be


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of reasoning in an answer, and the marks around it. Up to three more complete a
    character.

    start: the place where the answer begins. end_ids: the tokens that end reasoning.
    """

    limit: int
    thoughts: Thoughts
    start: Start
    end_ids: tuple[int, ...]
    token_bytes: Mapping[int, bytes]

    @classmethod
    def of(
        cls, limit: int, thoughts: Thoughts, start: Start, tokenizer: Tokenizer, *, calls: bool = False
    ) -> ThinkingBudget:
        """calls: a grammar allows a call after the reasoning, so the answer's words are not begun."""
        end = thoughts.close + thoughts.turn if calls else thoughts.forced or thoughts.close
        end_ids = tokenizer.encode(end, add_special_tokens=False)
        return cls(limit, thoughts, start, tuple(end_ids), tokenizer.token_bytes)

    async def generate(
        self, engine_generate: Callable[[Request], AsyncGenerator[Output, None]], request: Request
    ) -> AsyncGenerator[Output, None]:
        """Yields the outputs of the request within the budget. Closing it early aborts the request."""
        limited = LimitedRequest(self, request)
        held: Output | None = None  # an end that is due at once waits for the engine's first output
        while True:
            if limited.is_spent:
                end = limited.end()
                if not limited.has_run and end.finish_reason is None:
                    held = end
                else:
                    yield end
                if end.finish_reason is not None:
                    return
            current = limited.current
            async with contextlib.aclosing(engine_generate(current)) as outputs:
                async for output in outputs:
                    request.worker, request.prefill_worker = current.worker, current.prefill_worker
                    output = limited.push(output)
                    if held is not None:
                        output, held = _joined(held, output), None
                    yield output
                    if output.finish_reason is not None:
                        return
                    if limited.is_spent:
                        break
                else:
                    return


class LimitedRequest:
    """A request within a budget: `current` is what the engine runs. Once the budget is spent, `end` gives the
    tokens that end the reasoning, and `current` is the request that continues after them."""

    def __init__(self, budget: ThinkingBudget, request: Request) -> None:
        self._budget, self._request = budget, request
        self._counter = ThoughtCounter(budget)
        self._answer = list(request.output_token_ids)
        self._number = 0
        self._first = self.current = request  # the first one reports the prompt's own figures
        self.has_run = False

    @property
    def is_spent(self) -> bool:
        """True if the reasoning must end now."""
        return self._counter.is_spent

    def push(self, output: Output) -> Output:
        """Returns an output of `current` as one of the request, up to the end of the budget."""
        self.has_run = True
        output = _cut(output, self._counter.push(output.token_ids))
        self._answer += output.token_ids
        output.request_id = self._request.request_id
        if self.current is not self._first:
            output.num_cached_tokens, output.spans = 0, None
        return output

    def end(self) -> Output:
        """Returns the tokens that end reasoning, as far as max_tokens allows, and moves `current` on."""
        request, answer = self._request, self._answer
        ids, finish = list(self._budget.end_ids), None
        if (most := request.params.max_tokens) is not None and len(answer) + len(ids) >= most:
            ids, finish = ids[: most - len(answer)], FinishReason.LENGTH
        self._counter.close()
        answer += ids
        self._number += 1
        self.current = _continuation(request, answer, self._number, has_run=self.has_run)
        if not self.has_run:
            self._first = self.current
        logprobs = None if request.params.logprobs is None else [{i: Logprob(CERTAIN, 1)} for i in ids]
        return Output(request.request_id, ids, logprobs, finish_reason=finish)


class ThoughtCounter:
    """Counts the tokens of reasoning in an answer. It looks for the marks in the tokens' bytes, as a mark may
    be one token or be spelled by several."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._left, self._token_bytes = budget.limit, budget.token_bytes
        self._open, self._close = budget.thoughts.open.encode(), budget.thoughts.close.encode()
        self._reopens = budget.thoughts.anywhere
        self._is_inside = budget.start in (Start.INSIDE, Start.AMID)
        self._is_over = budget.start is Start.AFTER and not self._reopens
        self._text = b""  # the end of the text, as much as may belong to the next mark

    @property
    def is_spent(self) -> bool:
        """True if reasoning must end now. A character that has begun may first become whole, as a grammar
        allows no mark within one."""
        if not self._is_inside or self._left > 0:
            return False
        return self._left <= -MOST_OF_CHARACTER or not _ends_within_character(self._text)

    def push(self, token_ids: Sequence[int]) -> int:
        """Counts further tokens. Returns how many of them are within the budget; the others are not
        counted."""
        if self._is_over:
            return len(token_ids)
        for i, token_id in enumerate(token_ids):
            self._text += self._token_bytes[token_id]
            if self._is_inside:
                self._left -= 1
                if (at := self._text.find(self._close)) >= 0:
                    rest = self._text[at + len(self._close) :]
                    self.close()
                    self._text = rest
            else:
                self._look_for_open()
            if self._is_over:
                return len(token_ids)
            if self.is_spent:
                return i + 1
            self._text = self._text[-max(len(self._open), len(self._close)) :]
        return len(token_ids)

    def close(self) -> None:
        """Ends reasoning."""
        self._text, self._is_inside, self._is_over = b"", False, not self._reopens

    def _look_for_open(self) -> None:
        if self._reopens:
            at = self._text.find(self._open)
        else:
            self._text = self._text.lstrip(SPACE)
            at = 0 if self._text.startswith(self._open) else -1
            self._is_over = at < 0 and not self._open.startswith(self._text)
        if at >= 0:
            self._text = self._text[at + len(self._open) :]
            self._is_inside = True


def _ends_within_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-MOST_OF_CHARACTER:])
    return decoder.getstate()[0] != b""


def _cut(output: Output, count: int) -> Output:
    """Returns the output up to its first `count` tokens. The end of an answer that has further tokens is
    dropped with them, unless the engine aborted it or failed."""
    if count == len(output.token_ids):
        return output
    goes_on = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return replace(
        output,
        token_ids=output.token_ids[:count],
        logprobs=None if output.logprobs is None else output.logprobs[:count],
        drafted=None if (one := output.drafted) is None else replace(one, places=one.places[:count]),
        finish_reason=None if goes_on else output.finish_reason,
        stop_reason=None if goes_on else output.stop_reason,
    )


def _joined(first: Output, then: Output) -> Output:
    """Returns `then` with the tokens of `first` before its own."""
    logprobs = None
    if first.logprobs is not None:
        logprobs = first.logprobs + (then.logprobs or [])
    drafted = then.drafted
    if drafted is not None:
        drafted = replace(drafted, places=[0] * len(first.token_ids) + drafted.places)
    ids = first.token_ids + then.token_ids
    return replace(then, token_ids=ids, logprobs=logprobs, drafted=drafted)


def _continuation(request: Request, answer: Sequence[int], number: int, *, has_run: bool) -> Request:
    """Returns the request that continues after these tokens. The request before it may not be quite aborted
    yet, so it has an id of its own. has_run: the engine has returned the prompt's log-probabilities."""
    params = copy_params(request.params)
    if has_run:
        params.prompt_logprobs = None
    return replace(
        request, request_id=f"{request.request_id}-{number}", params=params, output_token_ids=list(answer)
    )
