"""`sizes_for`: the least numbers of workers that meet targets for TTFT and ITL at a load, by queueing theory.
One worker's times are engine_profile.py's; the load and its forecast are sla_rules.py's.

NVIDIA Dynamo's planner divides tokens by throughput, so that its target for the first token does not affect
the number of prefill workers. Here the latency of each number of workers is computed, and the least number
that meets the targets is chosen.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.fleet.planner.engine_profile import EngineProfile

SLOW_SHARE = 0.1  # share of first tokens that may be later than the target
MOST_BUSY = 0.9  # largest share of a worker's time for prompts
KV_USAGES = [number / 100 for number in range(91)]  # candidates; above them, requests compete for the cache
ANY_TIME_S = 1e9  # later than any token without an overload


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of one model: requests per second, and the mean lengths of prompts and answers in tokens."""

    rate: float
    input_length: float
    output_length: float


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets in seconds: the time to the first token for all but SLOW_SHARE of the requests, and the mean
    time between tokens."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors of the times of prompts and tokens in this fleet to the profile's. Below 1 if, for example, a
    part of the prompts is cached."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies, infinite in an overload. `slow_ttft_s`: the time to the first token that only SLOW_SHARE of
    the requests exceed."""

    ttft_s: float
    slow_ttft_s: float
    itl_s: float


OVERLOADED = Latency(math.inf, math.inf, math.inf)


def latency_apart(
    profile: EngineProfile, demand: Demand, corrections: Corrections, num_prefill: int, num_decode: int
) -> Latency:
    """Returns the latency of a fleet with separate prefill and decode workers."""
    prompt_s = profile.ttft_s(demand.input_length) * corrections.prefill
    ttft_s, slow_ttft_s = _first_token(demand.rate, prompt_s, num_prefill)
    return Latency(ttft_s, slow_ttft_s, _itl_s(profile, demand, corrections, num_decode))


def latency_both(
    profile: EngineProfile, demand: Demand, corrections: Corrections, num_workers: int
) -> Latency:
    """Returns the latency of workers with the role both. A step that computes a prompt also generates a token
    for each running request, which lengthens it by the time of reading their KV; all other steps only
    generate."""
    if not num_workers:
        return OVERLOADED
    rate = demand.rate / num_workers
    context = demand.input_length + demand.output_length / 2
    prompt_s = profile.ttft_s(demand.input_length) * corrections.prefill
    for usage in KV_USAGES:
        step_s = profile.itl_s(usage, context) * corrections.decode
        long_step_s = prompt_s + step_s - profile.itl_s(0.0, context) * corrections.decode
        left = 1 - rate * long_step_s  # share of the time for steps that only generate
        if left <= 0:
            return OVERLOADED
        itl_s = 1 / (rate + left / step_s)
        if _is_enough(profile, demand, usage, itl_s, rate):
            ttft_s, slow_ttft_s = _first_token(demand.rate, long_step_s, num_workers)
            half_s = step_s / 2 if demand.rate else 0.0  # the mean rest of a running step
            return Latency(ttft_s + half_s, slow_ttft_s + half_s, itl_s)
    return OVERLOADED


def _first_token(rate: float, prompt_s: float, num_workers: int) -> tuple[float, float]:
    """Returns the mean time to the first token, and the time that SLOW_SHARE of the requests exceed. Prompts
    wait in one queue and take equally long; the probability of waiting is Sakasegawa's (1977)."""
    if not num_workers:
        return math.inf, math.inf
    busy = rate * prompt_s / num_workers
    if busy > MOST_BUSY:
        return math.inf, math.inf
    waits = busy ** (math.sqrt(2 * (num_workers + 1)) - 1)  # probability that a prompt waits
    mean_s = prompt_s / (2 * num_workers * (1 - busy))  # mean wait of a waiting prompt
    slow_s = mean_s * math.log(waits / SLOW_SHARE) if waits > SLOW_SHARE else 0.0
    return prompt_s + waits * mean_s, prompt_s + slow_s


def _itl_s(profile: EngineProfile, demand: Demand, corrections: Corrections, num_workers: int) -> float:
    """Returns the mean time between tokens of decode workers."""
    if not num_workers:
        return math.inf
    rate = demand.rate / num_workers
    context = demand.input_length + demand.output_length / 2
    for usage in KV_USAGES:
        itl_s = profile.itl_s(usage, context) * corrections.decode
        if _is_enough(profile, demand, usage, itl_s, rate):
            return itl_s
    return math.inf


def _is_enough(profile: EngineProfile, demand: Demand, usage: float, itl_s: float, rate: float) -> bool:
    """Returns True if a cache this full holds the requests that arrive during one request, within the
    worker's limit of running requests."""
    running = profile.num_running(usage, demand.input_length + demand.output_length / 2)
    return running >= rate * demand.output_length * itl_s and running <= profile.data.max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers by role: `num_prefill` is 0 without separate prefill workers. `why_not`: the reason why they
    miss the targets; "" if they meet them."""

    num_prefill: int
    num_decode: int
    why_not: str = ""


def sizes_for(
    profile: EngineProfile,
    demand: Demand,
    corrections: Corrections,
    targets: Targets,
    *,
    is_apart: bool,
    most: int,
) -> Sizes:
    """Returns the least numbers of workers, from 1 to `most` of a role, that meet the targets. A target that
    even an idle worker misses is left out: then the numbers only keep up with the load."""
    idle = Demand(0.0, demand.input_length, demand.output_length)
    best = latency_apart(profile, idle, corrections, 1, 1)
    if not is_apart:
        best = latency_both(profile, idle, corrections, 1)
    why, ttft_s, itl_s = [], targets.ttft_s, targets.itl_s
    if best.slow_ttft_s > ttft_s:
        why.append(f"an idle worker takes {best.slow_ttft_s:.3g} s to a first token (ttft {ttft_s:g})")
        ttft_s = ANY_TIME_S
    if best.itl_s > itl_s:
        why.append(f"an idle worker takes {best.itl_s:.3g} s for a token (itl {itl_s:g})")
        itl_s = ANY_TIME_S
    if is_apart:
        prefill = _least(
            most, lambda n: latency_apart(profile, demand, corrections, n, 1).slow_ttft_s <= ttft_s
        )
        decode = _least(most, lambda n: latency_apart(profile, demand, corrections, 1, n).itl_s <= itl_s)
    else:
        prefill = 0

        def holds(num_workers: int) -> bool:
            found = latency_both(profile, demand, corrections, num_workers)
            return found.slow_ttft_s <= ttft_s and found.itl_s <= itl_s

        decode = _least(most, holds)
    if prefill is None or decode is None:
        why.append(f"{most} workers are too few")
    return Sizes(most if prefill is None else prefill, decode or most, "; ".join(why))


def _least(most: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the least number from 1 to `most` for which `holds` is true, assuming it is monotonic, or
    None."""
    if not holds(most):
        return None
    return bisect.bisect_left(range(1, most), True, key=holds) + 1
