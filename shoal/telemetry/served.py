"""Monotonic counters reported by a worker, and recent rates derived from them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

import msgspec

from shoal.api import FinishReason
from shoal.telemetry.metrics import LATENCY_SECONDS, ModelMetrics


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of times, in seconds."""

    p50: float
    p99: float


class RecentRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rates and latencies of the last minute. None: no requests, or no measurement."""

    prompt_tokens_s: float = 0.0  # tokens per second
    output_tokens_s: float = 0.0
    hit_rate: float | None = None  # share of cached prompt tokens
    ttft: Quantiles | None = None  # from a request's arrival to its first token
    itl: Quantiles | None = None  # between two tokens
    acceptance: float | None = None  # share of verified drafts that became tokens of answers
    tokens_a_draft: float | None = None  # tokens that a step with drafts of a sequence gives it


class ServedTotals(msgspec.Struct, omit_defaults=True):
    """Sums since the start. Times are counted in the buckets of LATENCY_SECONDS, and one more for longer
    times."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in a cache
    output_tokens: int = 0
    failed: int = 0  # requests that ended with an error
    first_token: list[int] = []  # []: all zeros
    between_tokens: list[int] = []
    draft_steps: int = 0  # steps with drafts, summed over sequences
    verified: int = 0  # drafts
    accepted: int = 0  # drafts that became tokens of answers

    @classmethod
    def counting(cls) -> ServedTotals:
        """Returns totals with buckets for times."""
        size = len(LATENCY_SECONDS) + 1
        return cls(first_token=[0] * size, between_tokens=[0] * size)

    def add_first(self, ttft_s: float, num_tokens: int) -> None:
        """Counts a request's first tokens, `ttft_s` after its arrival."""
        self.first_token[bisect.bisect_left(LATENCY_SECONDS, ttft_s)] += 1
        self.output_tokens += num_tokens

    def add_further(self, seconds: float, num_tokens: int) -> None:
        """Counts a request's further tokens, `seconds` after the ones before."""
        self.between_tokens[bisect.bisect_left(LATENCY_SECONDS, seconds / num_tokens)] += num_tokens
        self.output_tokens += num_tokens

    def since(self, before: ServedTotals) -> ServedTotals:
        """Returns the counts after `before`. If a count is lower than before, the process has restarted, and
        all counts are returned."""
        first_token = _minus(self.first_token, before.first_token)
        between_tokens = _minus(self.between_tokens, before.between_tokens)
        output_tokens, failed = self.output_tokens - before.output_tokens, self.failed - before.failed
        if min(output_tokens, failed, *first_token, *between_tokens) < 0:
            return self
        return ServedTotals(
            max(0, self.prompt_tokens - before.prompt_tokens),
            max(0, self.cached_tokens - before.cached_tokens),
            output_tokens,
            failed,
            first_token,
            between_tokens,
            max(0, self.draft_steps - before.draft_steps),
            max(0, self.verified - before.verified),
            max(0, self.accepted - before.accepted),
        )


def totals_of(metrics: ModelMetrics) -> ServedTotals:
    return ServedTotals(
        metrics.prompt_tokens,
        metrics.cached_tokens,
        metrics.generation_tokens,
        metrics.finished[FinishReason.ERROR],
        list(metrics.first_token.counts),
        list(metrics.between_tokens.counts),
        metrics.drafts.num_steps,
        metrics.drafts.num_verified,
        metrics.drafts.num_accepted,
    )


def sum_totals(parts: Iterable[ServedTotals]) -> ServedTotals:
    total = ServedTotals()
    for one in parts:
        total.prompt_tokens += one.prompt_tokens
        total.cached_tokens += one.cached_tokens
        total.output_tokens += one.output_tokens
        total.failed += one.failed
        total.first_token = _plus(total.first_token, one.first_token)
        total.between_tokens = _plus(total.between_tokens, one.between_tokens)
        total.draft_steps += one.draft_steps
        total.verified += one.verified
        total.accepted += one.accepted
    return total


def recent_rates(
    now: ServedTotals, before: ServedTotals, seconds: float, earlier: ServedTotals
) -> RecentRates:
    """Returns rates since `before`, which is `seconds` ago; shares and times since `earlier`."""
    has_restarted = now.output_tokens < before.output_tokens
    base, lately = ServedTotals() if has_restarted else before, now.since(earlier)
    prompt = lately.prompt_tokens
    return RecentRates(
        prompt_tokens_s=round(max(0, now.prompt_tokens - base.prompt_tokens) / seconds, 1),
        output_tokens_s=round((now.output_tokens - base.output_tokens) / seconds, 1),
        hit_rate=round(min(1.0, lately.cached_tokens / prompt), 4) if prompt else None,
        ttft=quantiles_of(lately.first_token),
        itl=quantiles_of(lately.between_tokens),
        acceptance=round(lately.accepted / lately.verified, 4) if lately.verified else None,
        tokens_a_draft=round(1 + lately.accepted / lately.draft_steps, 2) if lately.draft_steps else None,
    )


def quantiles_of(counts: Sequence[int]) -> Quantiles | None:
    """Returns quantiles of times counted in LATENCY_SECONDS, each to within a bucket, which is a twelfth
    wide. None without counts."""
    sums = list(itertools.accumulate(counts))
    if not sums or not sums[-1]:
        return None
    return Quantiles(_quantile(counts, sums, 0.5), _quantile(counts, sums, 0.99))


def _quantile(counts: Sequence[int], sums: Sequence[int], share: float) -> float:
    rank = share * sums[-1]
    bucket = bisect.bisect_left(sums, rank)
    if bucket >= len(LATENCY_SECONDS):
        return LATENCY_SECONDS[-1]
    low, high = LATENCY_SECONDS[bucket - 1] if bucket else 0.0, LATENCY_SECONDS[bucket]
    part = (rank - sums[bucket] + counts[bucket]) / counts[bucket]
    return float(f"{low + part * (high - low):.3g}")


def _minus(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Returns differences; [] if all are zero."""
    if now == before:
        return []
    return [a - b for a, b in zip(now, before)] if before else list(now)


def _plus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b)] if a and b else list(a or b)
