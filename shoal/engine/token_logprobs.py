"""Puts log-probabilities of a completed step into the form of outputs."""

from __future__ import annotations

from shoal.api import Logprob, TokenLogprobs
from shoal.engine.runner.logprobs import LogprobLists
from shoal.engine.runner.sampler_options import num_prompt_targets
from shoal.engine.scheduling.scheduler import StepPlan


def keep_prompt_logprobs(plan: StepPlan, found: LogprobLists) -> None:
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
            seq.prompt_logprobs.append(token_logprobs(found, at + i, target, k))
        at += num_prompt_targets(entry)


def token_logprobs(found: LogprobLists, i: int, token_id: int, k: int) -> TokenLogprobs:
    """vLLM's map for one token: itself with its rank, and the k best (all of them for k = -1)."""
    best_ids, best = found.top_ids[i], found.top[i]
    if k >= 0:
        best_ids, best = best_ids[:k], best[:k]
    ranked = {
        token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(zip(best_ids, best), start=1)
    }
    return {token_id: Logprob(found.chosen[i], found.ranks[i])} | ranked
