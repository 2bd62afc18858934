"""Routing policies: pure functions of request, candidates and random numbers that return each worker's cost.
`choose` samples a worker from the costs; KvRouter (kv_router.py) collects the overlap and load of each
candidate.

`kv` is NVIDIA Dynamo's cost, in blocks, lower is better:

    cost = prefill_load_scale * max(0, prefill blocks - credits for what is cached)
         + active blocks + decode_active_request_weight * active requests

plus one term that Dynamo does not have: a share of the prefill work that the worker was given lately, so that
requests that arrive one after the other spread over otherwise equal workers. `kv_logit` is Dynamo's older
weighted sum of overlap, cache usage and load, higher is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

import msgspec

from shoal.errors import ConfigError
from shoal.fleet.index.indexer import Overlap, WorkerRank
from shoal.fleet.routing.active_requests import Load

HOST_CREDIT, DISK_CREDIT = 0.75, 0.25  # Dynamo's defaults: a cached block of these tiers saves this share


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Weights with the names and defaults of Dynamo's KvRouterConfig, with two exceptions. The last field is
    Shoal's own. `overlap_score_credit` and `prefill_load_scale` are 1 in Dynamo: a block to compute then
    weighs no more than one that is held, and busy workers lose their prefixes
    (benchmarks/results/simulated.md)."""

    overlap_score_credit: float = 4.0
    prefill_load_scale: float = 4.0
    decode_active_request_weight: float = 0.0
    router_temperature: float = 0.0
    recent_prefill_weight: float = 0.4


class Candidate(msgspec.Struct, gc=False):
    """One worker, as a policy sees it. The overlap counts blocks of the worker's own size."""

    rank: WorkerRank
    block_size: int = 16
    overlap: Overlap = Overlap()
    load: Load = Load()
    kv_usage: float = 0.0  # published by the worker: the share of its KV cache in use
    num_waiting: int = 0  # published by the worker

    @property
    def cached_tokens(self) -> int:
        return self.overlap.total * self.block_size


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request, as a policy sees it. `turn`: the number of requests routed before it."""

    num_tokens: int
    session: str | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker, its overlap, and the cost of each worker (lower is better)."""

    rank: WorkerRank
    overlap: Overlap
    costs: dict[WorkerRank, float]


@dataclass(frozen=True, slots=True)
class Case:
    """All that a policy decides from. `block_size`: the unit of costs, in tokens, so that workers of several
    block sizes can be compared."""

    request: PolicyRequest
    candidates: Sequence[Candidate]
    weights: RouterWeights
    rng: Random
    block_size: int


Policy = Callable[[Case], dict[WorkerRank, float]]


def choose(
    policy: str,
    request: PolicyRequest,
    candidates: Sequence[Candidate],
    weights: RouterWeights,
    rng: Random,
    block_size: int,
) -> Choice:
    """Returns the worker that this policy prefers (see Case). Raises ValueError without candidates. Ties are
    broken by `rng`, or softened by the temperature."""
    costs = POLICIES[policy](Case(request, candidates, weights, rng, block_size))
    rank = _sample(costs, weights.router_temperature, rng)
    return Choice(rank, next(c.overlap for c in candidates if c.rank == rank), costs)


def check_policy(policy: str) -> None:
    """Raises ConfigError for an unknown name."""
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")


# The policies


def kv(case: Case) -> dict[WorkerRank, float]:
    return {c.rank: kv_cost(case.request, c, case.weights, case.block_size) for c in case.candidates}


def kv_cost(request: PolicyRequest, candidate: Candidate, weights: RouterWeights, block_size: int) -> float:
    """Returns the cost of one worker, in blocks of `block_size` tokens."""
    load, overlap = candidate.load, candidate.overlap
    cost = (
        load.active_tokens / block_size
        + weights.decode_active_request_weight * load.active_requests
        + weights.recent_prefill_weight * load.recent_tokens / block_size
    )
    prompt, waiting = request.num_tokens / block_size, load.prefill_tokens / block_size
    if overlap.total:
        on_device = weights.overlap_score_credit
        lower = HOST_CREDIT * overlap.host + DISK_CREDIT * overlap.disk
        # A cached block need not be computed: up to one block of credit each. Credit above one is deducted
        # from the prefills that wait at the worker, and never hides blocks that are left to compute.
        scale = candidate.block_size / block_size
        prompt = max(prompt, scale * overlap.total)
        prompt = max(0.0, prompt - scale * (min(1.0, on_device) * overlap.device + lower))
        waiting = max(0.0, waiting - scale * max(0.0, on_device - 1.0) * overlap.device)
    return weights.prefill_load_scale * (prompt + waiting) + cost


def kv_logit(case: Case) -> dict[WorkerRank, float]:
    most_waiting = max((c.num_waiting + c.load.active_requests for c in case.candidates), default=0)
    costs = {}
    for c in case.candidates:
        share = min(1.0, c.cached_tokens / max(1, case.request.num_tokens))
        waiting = (c.num_waiting + c.load.active_requests) / most_waiting if most_waiting else 0.0
        costs[c.rank] = -(2.0 * share - c.kv_usage - waiting)
    return costs


def round_robin(case: Case) -> dict[WorkerRank, float]:
    turn = case.request.turn % max(1, len(case.candidates))
    return {c.rank: float((number - turn) % len(case.candidates)) for number, c in enumerate(case.candidates)}


def random(case: Case) -> dict[WorkerRank, float]:
    return {c.rank: case.rng.random() for c in case.candidates}


def least_loaded(case: Case) -> dict[WorkerRank, float]:
    return {c.rank: float(c.load.active_requests) for c in case.candidates}


def power_of_two(case: Case) -> dict[WorkerRank, float]:
    """Costs of two random workers by their load; the others cost infinity."""
    two = case.rng.sample(case.candidates, min(2, len(case.candidates)))
    return {
        c.rank: float(c.load.active_requests) if any(c is one for one in two) else math.inf
        for c in case.candidates
    }


def affinity(case: Case) -> dict[WorkerRank, float]:
    """Rendezvous hashing (Thaler, Ravishankar 1998): a session stays with its worker while that lives, and
    when a worker leaves, only its sessions move. Requests without a session go to the least loaded worker."""
    if case.request.session is None:
        return least_loaded(case)
    return {c.rank: -float(_score(case.request.session, c.rank)) for c in case.candidates}


POLICIES: dict[str, Policy] = {
    "kv": kv,
    "kv_approx": kv,  # the same cost, with overlaps predicted from the router's own decisions
    "round_robin": round_robin,
    "random": random,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "affinity": affinity,
    "kv_logit": kv_logit,
}


def _score(session: str, rank: WorkerRank) -> int:
    named = f"{len(session)}:{session}:{rank.worker}:{rank.rank}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "big")


def _sample(costs: dict[WorkerRank, float], temperature: float, rng: Random) -> WorkerRank:
    """Samples a rank: the least cost at temperature 0, else a softmax over the costs' own span, as in
    Dynamo."""
    least = min(costs.values())
    finite = [cost for cost in costs.values() if cost != math.inf]
    span = max(finite) - least
    if temperature <= 0 or not span:
        return rng.choice([rank for rank, cost in costs.items() if cost == least])
    likely = [math.exp(-(cost - least) / (span * temperature)) for cost in costs.values()]
    return rng.choices(list(costs), likely)[0]
