"""`outputs_of`: the outputs of a completed step: tokens, log-probabilities, embeddings, and a request's spans
with its first token. engine/step_loop.py launches and completes steps."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass

from shoal.api import Output, Span
from shoal.engine.runner.runner import StepResult
from shoal.engine.scheduling.draft_lengths import drafted
from shoal.engine.scheduling.scheduler import StepPlan, TokenResult
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.token_logprobs import keep_prompt_logprobs, token_logprobs


@dataclass(slots=True)
class InFlight:
    """A step that was launched and is not completed yet."""

    plan: StepPlan
    result: StepResult
    embeds: list[int]  # indices of the samples that result.embeddings holds, in its order
    launched_at: float  # seconds of the monotonic clock
    ran_until: float | None = None  # None: it may still run


def outputs_of(
    step: InFlight, results: list[TokenResult], tokens: abc.Sequence[list[int]] = ()
) -> list[Output]:
    """Returns an output for each result of the step (Scheduler.update). `tokens`: of each sample, where the
    step reports on drafts."""
    result, outputs = step.result, []
    logprobs = result.logprobs.to_lists() if result.logprobs is not None else None
    if result.prompt_logprobs is not None:
        keep_prompt_logprobs(step.plan, result.prompt_logprobs.to_lists())
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
            output.embedding = embeddings[result.first_row(sampled.sample)]
            continue
        output.token_ids = sampled.token_ids
        if result.reports:
            num_sampled, report = len(tokens[sampled.sample]), result.reports[sampled.sample]
            output.drafted = drafted(len(sampled.token_ids), num_sampled, report)
        if sampled.finish_reason is not None:
            output.stop_reason = seq.stop_reason
        if logprobs is not None and params.logprobs is not None:
            first = result.first_row(sampled.sample)
            output.logprobs = [
                token_logprobs(logprobs, first + i, token_id, params.logprobs)
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
    computed: dict[str, str | int | float] = {"tokens": num_given - seq.num_cached_tokens}
    if seq.num_recomputed_tokens:
        computed["recomputed"] = seq.num_recomputed_tokens
    spans.append(Span("prefill", seconds, seconds, attributes=computed))
    return spans
