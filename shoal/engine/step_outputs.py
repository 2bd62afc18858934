"""`outputs_of`: the outputs of a completed step: tokens, log-probabilities, embeddings, and a request's spans
with its first token. engine/step_loop.py launches and completes steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.api import Logprob, Output, Span, TokenLogprobs
from shoal.engine.runner.batch import num_prompt_targets
from shoal.engine.runner.runner import StepResult
from shoal.engine.runner.sampling import LogprobLists
from shoal.engine.scheduling.scheduler import StepPlan, TokenResult
from shoal.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class InFlight:
    """A step that was launched and is not completed yet."""

    plan: StepPlan
    result: StepResult
    embeds: list[int]  # indices of the samples that result.embeddings holds, in its order
    launched_at: float  # seconds of the monotonic clock


def outputs_of(step: InFlight, results: list[TokenResult]) -> list[Output]:
    """Returns an output for each result of the step (Scheduler.update)."""
    result, outputs = step.result, []
    logprobs = result.logprobs.to_lists() if result.logprobs is not None else None
    if result.prompt_logprobs is not None:
        _keep_prompt_logprobs(step.plan, result.prompt_logprobs.to_lists())
    embeddings: dict[int, list[float]] = {}
    if result.embeddings is not None:
        embeddings = dict(zip(step.embeds, result.embeddings.tolist()))
    for sampled in results:
        seq, params = sampled.seq, sampled.seq.request.params
        num_given = seq.num_prompt_tokens + len(seq.request.output_token_ids)
        is_first = len(seq.token_ids) - len(sampled.token_ids) == num_given
        if is_first and seq.started_at is None:  # It began as a decode.
            seq.started_at = step.launched_at
        output = Output(
            seq.request.request_id,
            [],
            finish_reason=sampled.finish_reason,
            num_cached_tokens=seq.num_cached_tokens,
            spans=_spans_of(seq, num_given, time.monotonic()) if is_first else None,
        )
        outputs.append(output)
        if seq.request.embed:
            output.embedding = embeddings[sampled.sample]
            continue
        output.token_ids = sampled.token_ids
        if sampled.finish_reason is not None:
            output.stop_reason = seq.stop_reason
        if logprobs is not None and params.logprobs is not None:
            first = sampled.sample * result.queries
            output.logprobs = [
                _token_logprobs(logprobs, first + i, token_id, params.logprobs)
                for i, token_id in enumerate(sampled.token_ids)
            ]
        if params.prompt_logprobs is not None and is_first:
            output.prompt_logprobs = seq.prompt_logprobs or [None]
    return outputs


def _spans_of(seq: Sequence, num_given: int, now: float) -> list[Span]:
    """Returns the spans of the time up to the first token, which has just been sampled. A request is queued
    until its first step or its first fetch; fetches of its prefetch request that began before the request was
    added do not count. `num_given`: tokens that the request had when it was added."""
    assert seq.started_at is not None, "a token of no step"
    begun = [one.begun_at for one in seq.completed_fetches if one.begun_at >= seq.added_at]
    spans = [Span("queue", now - seq.added_at, min([seq.started_at, *begun]) - seq.added_at)]
    for one in seq.completed_fetches:
        attributes: dict[str, str | int | float] = {"from": one.source, "blocks": one.num_blocks}
        spans.append(Span("transfer", now - one.begun_at, one.seconds, attributes=attributes))
    seconds = now - seq.started_at
    spans.append(Span("prefill", seconds, seconds, attributes={"tokens": num_given - seq.num_cached_tokens}))
    return spans


def _keep_prompt_logprobs(plan: StepPlan, found: LogprobLists) -> None:
    """Adds a step's log-probabilities of prompt tokens to their sequences."""
    at = 0
    for entry in plan.scheduled:
        seq, k = entry.seq, entry.seq.request.params.prompt_logprobs
        if k is None:
            continue
        if entry.start == 0 or seq.prompt_logprobs is None:
            seq.prompt_logprobs = [None]
        for i in range(num_prompt_targets(entry)):
            target = seq.token_ids[entry.start + 1 + i]
            seq.prompt_logprobs.append(_token_logprobs(found, at + i, target, k))
        at += num_prompt_targets(entry)


def _token_logprobs(found: LogprobLists, i: int, token_id: int, k: int) -> TokenLogprobs:
    """vLLM's map for one token: itself with its rank, and the k best (all of them for k = -1)."""
    best_ids, best = found.top_ids[i], found.top[i]
    if k >= 0:
        best_ids, best = best_ids[:k], best[:k]
    ranked = {
        token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(zip(best_ids, best), start=1)
    }
    return {token_id: Logprob(found.chosen[i], found.ranks[i])} | ranked
