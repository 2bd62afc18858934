"""`decide_by_latency`: the planner's rules by latency: the fewest workers that meet the targets for TTFT and
ITL. predictors.py forecasts the load, and sla_sizing.py computes the workers for it.

Two loops share one state. The slow loop (adjustment_interval) records the load, forecasts it until a worker
that is started now has served for an interval, and sizes the fleet for the forecast by the profile of its
workers. The quick loop (load_adjustment_interval) adds workers when a target is missed now.

The structure is from NVIDIA Dynamo's SLA planner: averages of an interval, predictors, a profile, corrections
by observed latencies. Intended differences: corrections work in both directions, both targets affect the
numbers, the fleet shrinks only to a size that meets tighter targets too and has been sufficient for at least
one worker start-up time, and rounding never exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.planner.observation import CountChange, Decision, Observation, blocked_reason_of, counts_of
from shoal.fleet.planner.predictors import predict
from shoal.fleet.planner.sla_sizing import (
    Corrections,
    Demand,
    Latency,
    Sizes,
    Targets,
    latency_apart,
    latency_both,
    sizes_for,
)
from shoal.fleet.traffic import Traffic

FEW = 3  # requests; an average of fewer is not used
SHRINK_MARGIN = 0.8  # share of each target that a smaller fleet must meet
LEARN_MOST = 2.0  # largest factor of one correction step, before the square root
CORRECT_MOST = 10.0  # corrections are from 1 / CORRECT_MOST to CORRECT_MOST


class ObservedLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of an interval."""

    rate: float  # requests per second
    input_length: float
    output_length: float


class SlaState(msgspec.Struct, frozen=True):
    """State that a decision passes to the next one. Times are times of observations."""

    history: tuple[ObservedLoad, ...] = ()
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    planned_at: float | None = None  # end of the slow loop's last interval
    planned: Traffic = msgspec.field(default_factory=Traffic)  # traffic until then
    judged_at: float = 0.0  # end of the quick loop's last interval
    judged: Traffic = msgspec.field(default_factory=Traffic)
    is_steady: bool = True  # no worker started or ended in this interval of the slow loop
    was_calm: bool = False  # no worker started or ended in the quick loop's last interval
    has_plan_due: bool = False  # the slow loop waits for workers that start or end
    enough: tuple[dict[str, int], ...] = ()  # the slow loop's recent numbers, the latest last


def decide_by_latency(
    config: PlannerConfig,
    profile: EngineProfile,
    state: SlaState,
    observations: Sequence[Observation],
    *,
    other_gpus: int = 0,
    stuck: Collection[str] = (),
) -> tuple[Decision, SlaState]:
    """Decides at the end of an interval of the quick loop with these observations (at least one). `stuck`:
    roles that cannot get a worker now."""
    last, counts = observations[-1], counts_of(observations[-1])
    if state.planned_at is None:
        first = observations[0]
        state = SlaState(planned_at=first.at, planned=first.traffic, judged_at=first.at, judged=first.traffic)
    hindrance = blocked_reason_of(observations)
    recent, recent_s = last.traffic.since(state.judged), last.at - state.judged_at
    was_calm = state.was_calm
    state = msgspec.structs.replace(
        state,
        judged_at=last.at,
        judged=last.traffic,
        is_steady=state.is_steady and hindrance is None,
        was_calm=hindrance is None,
    )
    # An interval may end early by up to the time between two observations.
    if last.at - (state.planned_at or 0.0) > config.adjustment_interval - config.metric_pulling_interval / 2:
        state = _end_interval(config, profile, state, last, counts)
    if hindrance is not None:
        return Decision(at=last.at, changes=[], reason=hindrance, desired=counts), state
    if state.has_plan_due:
        wanted, reason, enough = _planned(config, profile, state, counts)
        enough_lately = (*state.enough, enough)[-max(1, _steps_ahead(config) - 1) :]
        state = msgspec.structs.replace(state, has_plan_due=False, enough=enough_lately)
    else:
        wanted, reason = counts, "the targets are met" if was_calm else "workers have just started or ended"
    if was_calm:
        more, why = _reaction(config, profile, state, recent, recent_s, last, counts)
        if any(count > wanted[role] for role, count in more.items()):
            reason = why
        wanted = {role: max(count, more.get(role, 0)) for role, count in wanted.items()}
    found, limit = _within_budget(config, wanted, counts, config.max_gpu_budget - other_gpus)
    if any(
        found[role] > counts[role] for role in stuck
    ):  # do not stop workers to make room for one that cannot start
        found = {role: max(count, min(wanted[role], counts[role])) for role, count in found.items()}
    wanted = found
    # Removed workers make room for added ones.
    changes = [CountChange(role, wanted[role] - count) for role, count in counts.items()]
    changes = sorted((each for each in changes if each.count), key=lambda each: each.count)
    return Decision(at=last.at, changes=changes, reason=reason + limit, desired=wanted), state


# The slow loop


def _end_interval(
    config: PlannerConfig, profile: EngineProfile, state: SlaState, last: Observation, counts: dict[str, int]
) -> SlaState:
    """Records the load, and corrects the profile by the observed latencies."""
    asked = last.traffic.since(state.planned)
    seconds = last.at - (state.planned_at or 0.0)
    before = state.history[-1] if state.history else None
    input_length = asked.mean_input or (before and before.input_length)
    output_length = asked.mean_output or (before and before.output_length)
    history = state.history
    prefill, decode = state.prefill_correction, state.decode_correction
    if input_length and output_length:  # otherwise no answer has ended yet
        now = ObservedLoad(asked.num_requests / seconds, input_length, output_length)
        history = (*history, now)[-config.load_prediction_window_size :]
        if state.is_steady and not config.no_correction:
            found = _latency(profile, counts, _demand(now), Corrections(prefill, decode))
            if asked.num_first >= FEW:
                prefill = _learnt(prefill, asked.mean_ttft_s, found.ttft_s)
            if asked.num_gaps >= FEW:
                decode = _learnt(decode, asked.mean_itl_s, found.itl_s)
    return msgspec.structs.replace(
        state,
        history=history,
        prefill_correction=prefill,
        decode_correction=decode,
        planned_at=last.at,
        planned=last.traffic,
        is_steady=state.was_calm,
        has_plan_due=True,
    )


def _learnt(correction: float, observed_s: float | None, expected_s: float) -> float:
    """Returns the correction after a geometric half-step towards the observation, in either direction.
    Overloads are not used, as their latencies are mostly waiting time."""
    if observed_s is None or not 0 < expected_s < math.inf:
        return correction
    ratio = min(LEARN_MOST, max(1 / LEARN_MOST, observed_s / expected_s))
    return min(CORRECT_MOST, max(1 / CORRECT_MOST, correction * math.sqrt(ratio)))


def _planned(
    config: PlannerConfig, profile: EngineProfile, state: SlaState, counts: dict[str, int]
) -> tuple[dict[str, int], str, dict[str, int]]:
    """Returns the numbers of workers, the reason, and the sufficient numbers."""
    if not state.history:
        wanted = {role: max(count, config.least(role)) for role, count in counts.items()}
        return wanted, "no request has ended yet", wanted
    demand = _forecast(config, state)
    if not demand.rate:
        enough = {role: config.least(role) for role in counts}
        tight, why = enough, "no requests are expected"
    else:
        sizes = _sizes(config, profile, state, demand, counts, 1.0)
        enough = _by_role(config, sizes, counts)
        tight = _by_role(config, _sizes(config, profile, state, demand, counts, SHRINK_MARGIN), counts)
        why = (
            f"{demand.rate:.3g} requests/s of {demand.input_length:.0f} tokens and "
            f"{demand.output_length:.0f} to generate are expected, corrections are "
            f"{state.prefill_correction:.2f} and {state.decode_correction:.2f}"
        )
        why += f", but {sizes.why_not}" if sizes.why_not else ""
    lately = state.enough or (counts,)
    wanted = {}
    for role, count in counts.items():
        least = max(tight[role], *(each.get(role, 0) for each in lately))
        wanted[role] = max(enough[role], min(count, least))
    return wanted, why, enough


def _steps_ahead(config: PlannerConfig) -> int:
    """Returns the number of intervals until a worker that is started now has served for one."""
    return math.ceil(config.startup_time / config.adjustment_interval) + 1


def _forecast(config: PlannerConfig, state: SlaState) -> Demand:
    """Returns the highest forecast rate until a worker that is started now has served for an interval, with
    the mean lengths."""
    steps = _steps_ahead(config)
    rates, inputs, outputs = (
        predict(config.load_predictor, values, steps, config.season)
        for values in zip(*((each.rate, each.input_length, each.output_length) for each in state.history))
    )
    return Demand(max(rates), max(1.0, sum(inputs) / steps), max(1.0, sum(outputs) / steps))


# The quick loop


def _reaction(
    config: PlannerConfig,
    profile: EngineProfile,
    state: SlaState,
    recent: Traffic,
    recent_s: float,
    last: Observation,
    counts: dict[str, int],
) -> tuple[dict[str, int], str]:
    """Returns the numbers of the roles that should grow, as a target is missed now or workers are missing,
    and the reason."""
    least = {role: config.least(role) for role in counts}
    if any(counts[role] < count for role, count in least.items()):
        return least, f"the model has fewer workers than {max(least.values())}"
    if not state.history or recent_s <= 0:
        return {}, ""
    before = state.history[-1]
    now = Demand(
        recent.num_requests / recent_s,
        recent.mean_input or before.input_length,
        recent.mean_output or before.output_length,
    )
    # More workers do not help with a target that an idle worker misses.
    idle = _latency(profile, dict.fromkeys(counts, 1), _demand(before, 0.0), _corrections(state))
    reasons, roles = [], []
    ttft_s = recent.mean_ttft_s if recent.num_first >= FEW else None
    if not recent.num_first and last.num_waiting and recent_s > config.ttft:
        ttft_s = recent_s  # no token for at least this time
    if ttft_s is not None and idle.slow_ttft_s <= config.ttft < ttft_s:
        roles.append("prefill" if "prefill" in counts else last.decode_role)
        reasons.append(f"the first token takes {ttft_s:.3g} s > {config.ttft:g}")
    itl_s = recent.mean_itl_s if recent.num_gaps >= FEW else None
    if itl_s is not None and idle.itl_s <= config.itl < itl_s:
        roles.append(last.decode_role)
        reasons.append(f"a token takes {itl_s:.3g} s > {config.itl:g}")
    needed = _by_role(config, _sizes(config, profile, state, now, counts, 1.0), counts)
    return {role: max(counts[role] + 1, needed[role]) for role in roles}, "; ".join(reasons)


# Common to both loops


def _demand(asked: ObservedLoad, rate: float | None = None) -> Demand:
    return Demand(asked.rate if rate is None else rate, asked.input_length, asked.output_length)


def _corrections(state: SlaState) -> Corrections:
    return Corrections(state.prefill_correction, state.decode_correction)


def _latency(
    profile: EngineProfile, counts: dict[str, int], demand: Demand, corrections: Corrections
) -> Latency:
    if "prefill" in counts:
        decode = next(count for role, count in counts.items() if role != "prefill")
        return latency_apart(profile, demand, corrections, counts["prefill"], decode)
    return latency_both(profile, demand, corrections, *counts.values())


def _sizes(
    config: PlannerConfig,
    profile: EngineProfile,
    state: SlaState,
    demand: Demand,
    counts: dict[str, int],
    margin: float,
) -> Sizes:
    least_gpus = min(config.gpus_of(role) for role in counts)
    return sizes_for(
        profile,
        demand,
        _corrections(state),
        Targets(config.ttft * margin, config.itl * margin),
        is_apart="prefill" in counts,
        most=max(1, config.max_gpu_budget // least_gpus),
    )


def _by_role(config: PlannerConfig, sizes: Sizes, counts: dict[str, int]) -> dict[str, int]:
    found = {role: sizes.num_prefill if role == "prefill" else sizes.num_decode for role in counts}
    return {role: max(config.least(role), count) for role, count in found.items()}


def _within_budget(
    config: PlannerConfig, wanted: dict[str, int], counts: dict[str, int], budget: int
) -> tuple[dict[str, int], str]:
    """Scales the wanted numbers down to a budget of GPUs, in proportion, and returns a note on that. If even
    the least numbers exceed it, nothing changes. If the present workers that stay wanted exceed it, they stay
    and none is added: another model's changes in flight may count for more GPUs than they will take."""
    needed = _gpus(config, wanted)
    if needed <= budget:
        return wanted, ""
    word = f"; {needed} GPUs are wanted, and {max(0, budget)} are left of the budget"
    kept = {role: min(count, counts[role]) for role, count in wanted.items()}
    if _gpus(config, kept) > budget:
        return kept, word
    found = {
        role: min(count, max(config.least(role), math.floor(count * budget / needed)))
        for role, count in wanted.items()
    }
    if _gpus(config, found) > budget:
        return counts, word
    # The remainder of rounding goes to the role that lacks most.
    for role in sorted(wanted, key=lambda name: found[name] / max(1, wanted[name])):
        more = (budget - _gpus(config, found)) // config.gpus_of(role)
        found[role] += min(wanted[role] - found[role], more)
    return found, word


def _gpus(config: PlannerConfig, counts: dict[str, int]) -> int:
    return sum(config.gpus_of(role) * count for role, count in counts.items())
