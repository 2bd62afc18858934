"""`decide_by_load`: the planner's rules by load, from queues and KV cache usage; at most one worker of a role
is added or removed in an interval. planner.py calls it in mode load; mode sla is sla_rules.py.

The rules, names and defaults are from the code of NVIDIA Dynamo's first planner (its documents give other
numbers for the interval and for both thresholds of the queue). Intended differences: the grace after an added
decode worker lasts whole intervals, counts of workers change within a decision, and a worker is removed only
if the remaining ones can carry its load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.observation import (
    WAITING_LOAD,
    CountChange,
    Decision,
    Observation,
    blocked_reason_of,
    counts_of,
)

TREND_INTERVALS = 3  # horizon for the trend of the prefill queue
GRACE_INTERVALS = 3  # full intervals after an added decode worker without removals


def decide_by_load(
    config: PlannerConfig, grace: int, observations: Sequence[Observation], *, other_gpus: int = 0
) -> tuple[Decision, int]:
    """Decides at the end of an interval with these observations (at least one). `grace`: further intervals in
    which decode may not shrink. Returns the decision and the grace for the next interval."""
    last = observations[-1]
    counts = counts_of(last)
    hindrance = blocked_reason_of(observations)
    if hindrance is not None:
        return Decision(at=last.at, changes=[], reason=hindrance, desired=counts), grace
    gpus = other_gpus + sum(config.gpus_of(role) * count for role, count in counts.items())
    changes: list[CountChange] = []
    reasons: list[str] = []
    kept: list[str] = []  # why a role is unchanged although its load is beyond a threshold
    rested = max(0, grace - 1)
    queue = [_prefill_queue(each) for each in observations] if "prefill" in counts else []
    loads = [load for each in observations for load in _kv_loads(each)]
    # Prefill comes before decode, as a queue for prefill raises the KV load of decode workers too. Removed
    # workers make room for added ones.
    for role, count, reason in list(_removals(config, grace, counts, queue, loads)):
        if not count:
            kept.append(reason)
            continue
        counts[role] += count
        gpus += count * config.gpus_of(role)
        changes.append(CountChange(role, count))
        reasons.append(reason)
    for role, count, reason in list(_additions(config, grace, last, counts, queue, loads)):
        if any(change.role == role for change in changes):
            continue
        if not count:
            kept.append(reason)
            continue
        if gpus + config.gpus_of(role) > config.max_gpu_budget:
            reasons.append(f"{reason}, but all {config.max_gpu_budget} GPUs of the budget are taken")
            continue
        counts[role] += count
        gpus += config.gpus_of(role)
        changes.append(CountChange(role, count))
        reasons.append(reason)
        if role != "prefill":
            rested = GRACE_INTERVALS
    reason = "; ".join(reasons or kept) or "the load is between the thresholds"
    return Decision(at=last.at, changes=changes, reason=reason, desired=counts), rested


def _prefill_queue(observation: Observation) -> int:
    """Returns the length of the prefill queue; without a prefill worker, prompts wait at decode workers."""
    return observation.prefill_queue if observation.prefill_workers else observation.num_waiting


def _kv_loads(observation: Observation) -> list[float]:
    """Returns the KV load of each worker, with its share of the requests that the router holds."""
    held = WAITING_LOAD * observation.queued / max(1, len(observation.decode))
    return [load.kv_load + held for load in observation.decode]


Step = tuple[str, int, str]  # role; 1, -1, or 0 for a role that is kept; reason


def _removals(
    config: PlannerConfig, grace: int, counts: dict[str, int], queue: list[int], loads: list[float]
) -> Iterator[Step]:
    prefill = counts.get("prefill", 0)
    if queue and prefill and (mean := fmean(queue)) < config.prefill_queue_scale_down_threshold:
        high = config.prefill_queue_scale_up_threshold
        # The last one is needed while any request generates, even with an empty queue.
        load = mean if prefill > 1 else max([mean, *loads])
        yield _removal(
            config,
            "prefill",
            prefill,
            f"the prefill queue is {mean:.2f} < {config.prefill_queue_scale_down_threshold:g}",
            can_spare_one=_can_spare_one(config, load, prefill, high),
        )
    role = next(role for role in counts if role != "prefill")
    if loads and (mean := fmean(loads)) < config.decode_kv_scale_down_threshold:
        high = config.decode_kv_scale_up_threshold
        yield _removal(
            config,
            role,
            counts[role],
            f"the KV load is {mean:.2f} < {config.decode_kv_scale_down_threshold:g}",
            can_spare_one=_can_spare_one(config, mean, counts[role], high),
            grace=grace,
        )


def _removal(
    config: PlannerConfig, role: str, count: int, reason: str, *, can_spare_one: bool, grace: int = 0
) -> Step:
    """Returns a removal for this reason, or why the worker is kept."""
    if count <= config.least(role):
        return role, 0, f"{reason}, but {config.least(role)} is the least number of {role} workers"
    if grace:
        return (
            role,
            0,
            f"{reason}, but none is removed in the {GRACE_INTERVALS} intervals after one was added",
        )
    if not can_spare_one:
        return role, 0, f"{reason}, but the others could not carry its load"
    return role, -1, reason


def _can_spare_one(config: PlannerConfig, load: float, count: int, most: float) -> bool:
    """Returns True if the other workers would stay below the threshold for adding one; False without
    others."""
    if not config.checks_remaining_load:
        return True
    return load * count / (count - 1) <= most if count > 1 else load == 0


def _additions(
    config: PlannerConfig,
    grace: int,
    last: Observation,
    counts: dict[str, int],
    queue: list[int],
    loads: list[float],
) -> Iterator[Step]:
    # Without a prefill worker, requests may wait for KV room as well as for their prompts. So decode grows
    # first, or the first prefill worker could take its last GPU.
    decode_is_full = bool(loads) and fmean(loads) > config.decode_kv_scale_up_threshold
    if queue and (counts["prefill"] or not decode_is_full):
        mean, high = fmean(queue), config.prefill_queue_scale_up_threshold
        ahead = queue[-1] + (queue[-1] - queue[0]) * TREND_INTERVALS
        if mean > high:
            reason = f"the prefill queue is {mean:.2f} > {high:g}"
            if ahead > high:
                yield "prefill", 1, f"{reason}, and will be {ahead}"
            else:
                yield "prefill", 0, f"{reason}, but decreasing"
    if decode_is_full:
        reason = f"the KV load is {fmean(loads):.2f} > {config.decode_kv_scale_up_threshold:g}"
        if config.grace_freezes_both and grace:
            yield last.decode_role, 0, f"{reason}, but one was added in the last {GRACE_INTERVALS} intervals"
        else:
            yield last.decode_role, 1, reason
    for role, count in counts.items():
        if count < config.least(role):
            yield role, 1, f"there are {count} {role} workers, and {config.least(role)} is the least number"
