"""How many workers of each role a fleet should have: a pure function of configuration, state and
observations. It reads no clock and starts nothing.

The load-based rules are those of NVIDIA Dynamo's first planner, with its names and its code's defaults (its
documents give other numbers for the interval and for both thresholds of the queue). What differs, on purpose:
the grace after an added decode worker lasts whole intervals, counts of workers change within a decision, and
a worker is removed only if those that stay can carry its load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from shoal.errors import ConfigError
from shoal.fields import check_fields, option

WAITING_LOAD = 0.02  # of KV load, for each request that waits at a worker
TREND_INTERVALS = 3  # how far ahead the trend of the prefill queue is followed
GRACE_INTERVALS = 3  # full intervals in which a new decode worker proves itself


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """`[planner]` of a fleet's file. Raises ConfigError."""

    enabled: bool = option(False, "whether the fleet is sized by its load")
    mode: str = option("load", "by which rules", choices=("load",))
    metric_pulling_interval: float = option(1.0, "seconds between two observations", above=0)
    adjustment_interval: float = option(10.0, "seconds between two decisions", above=0)
    prefill_queue_scale_up_threshold: float = option(5.0, "mean queue above which prefill grows", low=0)
    prefill_queue_scale_down_threshold: float = option(0.2, "mean queue below which prefill shrinks", low=0)
    decode_kv_scale_up_threshold: float = option(0.9, "mean KV load above which decode grows", low=0)
    decode_kv_scale_down_threshold: float = option(0.5, "mean KV load below which decode shrinks", low=0)
    min_endpoint: int = option(1, "workers of a role that always stay", low=0)
    max_gpu_budget: int = option(8, "GPUs that all workers may have together", low=1)
    decode_engine_num_gpu: int = option(1, "GPUs of a decode worker, or of one for both", low=1)
    prefill_engine_num_gpu: int = option(1, "GPUs of a prefill worker", low=1)
    grace_freezes_both: bool = option(False, "in its grace, decode does not grow either")
    checks_remaining_load: bool = option(True, "remove a worker only if the others can carry its load")
    no_operation: bool = option(False, "advise, and change nothing")
    start_timeout: float = option(600.0, "seconds that a new worker has to become ready", above=0)
    record: str | None = option(None, "file to which observations and decisions are appended, as JSON lines")

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for kind in ("prefill_queue", "decode_kv"):
            up = getattr(self, f"{kind}_scale_up_threshold")
            down = getattr(self, f"{kind}_scale_down_threshold")
            if down >= up:
                raise ConfigError(
                    f"{kind}_scale_down_threshold {down:g} is not below {kind}_scale_up_threshold {up:g}; a "
                    "fleet would grow and shrink at the same load"
                )
        least = self.min_endpoint * self.decode_engine_num_gpu
        if least > self.max_gpu_budget:
            raise ConfigError(
                f"min_endpoint {self.min_endpoint} needs {least} GPUs, and max_gpu_budget is "
                f"{self.max_gpu_budget}; lower the one or raise the other"
            )
        if self.adjustment_interval < self.metric_pulling_interval:
            raise ConfigError(
                f"adjustment_interval {self.adjustment_interval:g} is shorter than metric_pulling_interval "
                f"{self.metric_pulling_interval:g}; a decision needs an observation"
            )

    def gpus_of(self, role: str) -> int:
        return self.prefill_engine_num_gpu if role == "prefill" else self.decode_engine_num_gpu


class DecodeLoad(msgspec.Struct, frozen=True):
    """One decode worker, or one that does both. `num_waiting` counts where the worker tells of its slots."""

    kv_usage: float  # 0 to 1
    num_waiting: int = 0
    has_slots: bool = True

    @property
    def kv_load(self) -> float:
        return self.kv_usage + WAITING_LOAD * self.num_waiting * self.has_slots


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One model's workers at a moment. Only workers that are ready count in `prefill_workers` and `decode`.
    `decode_role`: "both" where prefill and decode are not apart. `pending`: workers that are being started or
    removed, or have died and will be replaced; while there are any, nothing is decided."""

    at: float  # seconds, any clock
    decode: list[DecodeLoad]
    decode_role: str = "both"
    prefill_workers: int = 0
    prefill_queue: int = 0
    queued: int = 0  # requests that the router holds until a worker has room
    pending: int = 0


class Change(msgspec.Struct, frozen=True):
    role: str
    count: int  # 1 to add a worker, -1 to remove one


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What should change, and why. `desired`: workers by role when the changes are made."""

    at: float
    changes: list[Change]
    reason: str
    desired: dict[str, int]


class PlannerState(msgspec.Struct, frozen=True):
    """What a decision leaves for the next one."""

    grace: int = 0  # further intervals in which decode may not shrink


def decide(
    config: PlannerConfig, state: PlannerState, observations: Sequence[Observation], *, other_gpus: int = 0
) -> tuple[Decision, PlannerState]:
    """The decision at the end of an interval with these observations (at least one). `other_gpus`: those of
    other models' workers, which share the budget."""
    last = observations[-1]
    counts = {last.decode_role: len(last.decode)}
    if last.prefill_workers or last.decode_role == "decode":
        counts["prefill"] = last.prefill_workers
    hindrance = _hindrance(observations)
    if hindrance is not None:
        return Decision(at=last.at, changes=[], reason=hindrance, desired=counts), state
    gpus = other_gpus + sum(config.gpus_of(role) * count for role, count in counts.items())
    changes: list[Change] = []
    reasons: list[str] = []
    rested = PlannerState(max(0, state.grace - 1))
    queue = [each.prefill_queue for each in observations] if "prefill" in counts else []
    loads = [load for each in observations for load in _kv_loads(each)]
    # Prefill comes before decode, as a queue for prefill raises the KV load of decode workers too. What is
    # removed makes room for what is added.
    for role, count, reason in list(_removals(config, state, counts, queue, loads)):
        counts[role] += count
        gpus += count * config.gpus_of(role)
        changes.append(Change(role, count))
        reasons.append(reason)
    for role, count, reason in list(_additions(config, state, last, counts, queue, loads)):
        if any(change.role == role for change in changes):
            continue
        if gpus + config.gpus_of(role) > config.max_gpu_budget:
            reasons.append(f"{reason}, but all {config.max_gpu_budget} GPUs of the budget are taken")
            continue
        counts[role] += count
        gpus += config.gpus_of(role)
        changes.append(Change(role, count))
        reasons.append(reason)
        if role != "prefill":
            rested = PlannerState(GRACE_INTERVALS)
    reason = "; ".join(reasons) or "the load is between the thresholds"
    return Decision(at=last.at, changes=changes, reason=reason, desired=counts), rested


def _hindrance(observations: Sequence[Observation]) -> str | None:
    """Why nothing can be decided now, if so."""
    if observations[-1].pending:
        return f"{observations[-1].pending} workers are coming or going"
    sizes = {(each.prefill_workers, len(each.decode)) for each in observations}
    if len(sizes) > 1:
        return "workers came or went in this interval, so its averages say nothing"
    return None


def _kv_loads(observation: Observation) -> list[float]:
    """The KV load of each worker, with its share of the requests that the router still holds."""
    held = WAITING_LOAD * observation.queued / max(1, len(observation.decode))
    return [load.kv_load + held for load in observation.decode]


Step = tuple[str, int, str]  # role, 1 or -1, reason


def _removals(
    config: PlannerConfig, state: PlannerState, counts: dict[str, int], queue: list[int], loads: list[float]
) -> Iterator[Step]:
    prefill = counts.get("prefill", 0)
    if queue and prefill > config.min_endpoint:
        mean = fmean(queue)
        low, high = config.prefill_queue_scale_down_threshold, config.prefill_queue_scale_up_threshold
        if mean < low and _can_spare_one(config, mean, prefill, high):
            yield "prefill", -1, f"the prefill queue is {mean:.2f} < {low:g}"
    role = next(role for role in counts if role != "prefill")
    if loads and counts[role] > config.min_endpoint and state.grace == 0:
        mean = fmean(loads)
        low, high = config.decode_kv_scale_down_threshold, config.decode_kv_scale_up_threshold
        if mean < low and _can_spare_one(config, mean, counts[role], high):
            yield role, -1, f"the KV load is {mean:.2f} < {low:g}"


def _can_spare_one(config: PlannerConfig, load: float, count: int, most: float) -> bool:
    """Whether the others would not be above the threshold at which one is added again."""
    if not config.checks_remaining_load or count == 1:
        return True
    return load * count / (count - 1) <= most


def _additions(
    config: PlannerConfig,
    state: PlannerState,
    last: Observation,
    counts: dict[str, int],
    queue: list[int],
    loads: list[float],
) -> Iterator[Step]:
    if queue:
        mean, high = fmean(queue), config.prefill_queue_scale_up_threshold
        ahead = queue[-1] + (queue[-1] - queue[0]) * TREND_INTERVALS
        if mean > high and ahead > high:
            yield "prefill", 1, f"the prefill queue is {mean:.2f} > {high:g}, and will be {ahead}"
    if loads:
        mean, high = fmean(loads), config.decode_kv_scale_up_threshold
        if mean > high and not (config.grace_freezes_both and state.grace):
            yield last.decode_role, 1, f"the KV load is {mean:.2f} > {high:g}"
    elif last.queued:
        yield last.decode_role, 1, f"{last.queued} requests wait, and there is no {last.decode_role} worker"
    for role, count in counts.items():
        if count < config.min_endpoint:
            yield role, 1, f"{count} {role} workers are fewer than min_endpoint {config.min_endpoint}"


# The record


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a planner's record: an observation, or the decision that followed."""

    model: str = ""
    observation: Observation | None = None
    decision: Decision | None = None
    other_gpus: int = 0


def replay(config: PlannerConfig, lines: Iterable[bytes | str]) -> Iterator[Recorded]:
    """Decides again what was decided in a record, from its observations alone. Raises ConfigError for a line
    that is no record."""
    states: dict[str, PlannerState] = {}
    observations: dict[str, list[Observation]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Recorded)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} of the record cannot be read: {error}") from None
        if entry.observation is not None:
            observations.setdefault(entry.model, []).append(entry.observation)
        elif entry.decision is not None and observations.get(entry.model):
            decision, states[entry.model] = decide(
                config,
                states.get(entry.model, PlannerState()),
                observations.pop(entry.model),
                other_gpus=entry.other_gpus,
            )
            yield Recorded(model=entry.model, decision=decision, other_gpus=entry.other_gpus)
