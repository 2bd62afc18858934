"""`decide`: the number of workers of each role, as a pure function of configuration, state and observations.
load_rules.py and sla_rules.py have the rules; scaling/loop.py observes the fleet and carries decisions out.

`decide` is for one model; it reads no clock and starts nothing. A `Planner` keeps the states of all models
that share a budget; the planner's loop and the simulator each have one. Observations and decisions form a
record, from which `replay` decides again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.errors import ConfigError
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile, read_profile
from shoal.fleet.planner.load_rules import decide_by_load
from shoal.fleet.planner.observation import CountChange, Decision, Failure, Move, Observation, counts_of
from shoal.fleet.planner.sla_rules import SlaState, decide_by_latency

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 600.0  # longest wait until a failed change is retried


class PlannerState(msgspec.Struct, frozen=True):
    """State that a decision passes to the next one."""

    grace: int = 0  # further intervals in which decode may not shrink
    sla: SlaState = SlaState()


def decide(
    config: PlannerConfig,
    state: PlannerState,
    observations: Sequence[Observation],
    *,
    other_gpus: int = 0,
    profile: EngineProfile | None = None,
) -> tuple[Decision, PlannerState]:
    """Decides at the end of an interval (config.judging_interval) with these observations (at least one).
    `other_gpus`: GPUs of other models' workers, which share the budget. `profile`: the profile of the model's
    workers, in mode "sla". Raises ConfigError if it is missing."""
    last = observations[-1]
    other_gpus += _gpus_aside(config, last)
    waiting = {
        (failure.role, failure.count): failure
        for failure in last.failures
        if last.at < _tried_again_at(config, failure)
    }
    rested = max(0, state.grace - 1)
    if config.mode == "load":
        wanted, grace = decide_by_load(config, state.grace, observations, other_gpus=other_gpus)
        state = PlannerState(grace)
    elif profile is None:
        raise ConfigError(
            'mode "sla" needs a profile of the model\'s workers; give its file ([planner] profile)'
        )
    else:
        stuck = {role for role, count in waiting if count > 0}
        wanted, sla = decide_by_latency(
            config, profile, state.sla, observations, other_gpus=other_gpus, stuck=stuck
        )
        state = PlannerState(sla=sla)
    wanted = _with_moves(config, wanted, waiting)
    decision = _without_waiting(config, wanted, waiting, last, other_gpus)
    if _grows_decode(wanted) and not _grows_decode(decision):  # so no grace begins
        state = msgspec.structs.replace(state, grace=rested)
    return decision, state


def _grows_decode(decision: Decision) -> bool:
    added = [change.role for change in decision.changes if change.count > 0]
    return any(role != "prefill" for role in [*added, *(move.to for move in decision.moves)])


Waiting = Mapping[tuple[str, int], Failure]  # by role and count, changes that must wait before a retry


def _with_moves(config: PlannerConfig, decision: Decision, waiting: Waiting) -> Decision:
    """With `change_roles`, converts workers of a shrinking role to a growing role."""
    if not config.change_roles:
        return decision
    counts = {change.role: change.count for change in decision.changes}
    moves: list[Move] = []
    for role in [name for name, count in counts.items() if count < 0 and (name, 0) not in waiting]:
        for to in [name for name, count in counts.items() if count > 0]:
            count = min(-counts[role], counts[to])
            moves.append(Move(role, to, count))
            counts[role] += count
            counts[to] -= count
    changes = [CountChange(role, count) for role, count in counts.items() if count]
    return msgspec.structs.replace(decision, changes=changes, moves=[move for move in moves if move.count])


def _without_waiting(
    config: PlannerConfig, decision: Decision, waiting: Waiting, last: Observation, other_gpus: int
) -> Decision:
    """Drops changes that have failed and must wait before a retry, twice as long each time. Additions that
    need the GPUs of a worker whose removal waits are dropped too."""
    found = [waiting.get((change.role, 1 if change.count > 0 else -1)) for change in decision.changes]
    if not any(found):
        return decision
    counts = counts_of(last)
    gpus = other_gpus + sum(config.gpus_of(role) * count for role, count in counts.items())
    for move in decision.moves:
        counts[move.role] -= move.count
        counts[move.to] += move.count
    changes, reasons = [], [decision.reason]
    for change, failure in zip(decision.changes, found):
        role, count = change.role, change.count
        if failure is not None:
            kind, wait_s = "add" if count > 0 else "remove", _tried_again_at(config, failure) - last.at
            reasons.append(
                f"to {kind} a {role} worker has failed {failure.times} times and is retried in {wait_s:.0f} s"
            )
            continue
        if count > 0:
            count = min(count, max(0, config.max_gpu_budget - gpus) // config.gpus_of(role))
        if count != change.count:
            reasons.append(f"{count or 'no'} {role} worker is added in its place")
        if count:
            counts[role] += count
            gpus += config.gpus_of(role) * count
            changes.append(CountChange(role, count))
    return msgspec.structs.replace(decision, changes=changes, reason="; ".join(reasons), desired=counts)


def _tried_again_at(config: PlannerConfig, failure: Failure) -> float:
    return failure.at + min(LONGEST_WAIT_S, config.adjustment_interval * 2.0 ** min(failure.times, 20))


def read_profiles(config: PlannerConfig, models: Iterable[str]) -> dict[str, EngineProfile]:
    """Returns the profile of each model, by its name for clients; empty in mode "load". Raises ConfigError
    for a missing or wrong profile."""
    if config.mode == "load":
        return {}
    given = config.profile
    if given is None:
        raise ConfigError(
            'mode "sla" needs profile, a file that shoal plan --profile MODEL --output FILE writes; measure '
            'one, or take mode = "load"'
        )
    found: dict[str, EngineProfile] = {}
    for model in models:
        path = given if isinstance(given, str) else given.get(model)
        if path is None:
            raise ConfigError(
                f"profile must have a file for {model!r}, got only {', '.join(given) or 'an empty table'}"
            )
        found[model] = read_profile(path)
    return found


class ModelDecision(NamedTuple):
    model: str
    decision: Decision
    other_gpus: int  # GPUs of the other models' workers at that time


class Planner:
    """`profiles`: profiles of the models' workers; None: read from the files in `config`. `num_gpus`: GPUs of
    all models' workers when the last decisions are carried out."""

    def __init__(self, config: PlannerConfig, profiles: Mapping[str, EngineProfile] | None = None) -> None:
        self.num_gpus = 0
        self._config = config
        self._profiles = None if profiles is None else dict(profiles)
        self._states: dict[str, PlannerState] = {}
        self._seen: dict[str, list[Observation]] = {}  # in this interval

    def see(self, model: str, observation: Observation) -> None:
        self._seen.setdefault(model, []).append(observation)

    def forget(self) -> None:
        """Drops the observations of this interval."""
        self._seen = {}

    def judge(self, last: Iterable[str] = ()) -> list[ModelDecision]:
        """Ends an interval: decides for one model after the other. Decisions for one count in the others'
        budget, so the models in `last` come last, in that order. Raises ConfigError for a missing profile."""
        seen, self._seen = self._seen, {}
        if self._profiles is None:
            self._profiles = read_profiles(self._config, seen)
        gpus = {model: _gpus_of(self._config, observations[-1]) for model, observations in seen.items()}
        late = [model for model in last if model in seen]
        judged: list[ModelDecision] = []
        for model in [*(model for model in seen if model not in late), *late]:
            others = sum(count for name, count in gpus.items() if name != model)
            decision, self._states[model] = decide(
                self._config,
                self._states.get(model, PlannerState()),
                seen[model],
                other_gpus=others,
                profile=self._profiles.get(model),
            )
            gpus[model] += sum(self._config.gpus_of(each.role) * each.count for each in decision.changes)
            judged.append(ModelDecision(model, decision, others))
        self.num_gpus = sum(gpus.values())
        return judged


def _gpus_of(config: PlannerConfig, observation: Observation) -> int:
    """Returns the number of GPUs of a model's workers."""
    serving = sum(config.gpus_of(role) * count for role, count in counts_of(observation).items())
    return serving + _gpus_aside(config, observation)


def _gpus_aside(config: PlannerConfig, observation: Observation) -> int:
    """Returns the number of GPUs of workers that do not serve now. Their roles are not observed, so they
    count with the larger number of GPUs."""
    largest = max(config.gpus_of(role) for role in counts_of(observation))
    return largest * (observation.pending + observation.paused + observation.draining)


# The record


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a planner's record: the configuration of a starting planner, an observation, a decision, or a
    gap in which the fleet could not be observed; earlier observations of its interval are not used."""

    config: dict[str, Any] | None = None  # a PlannerConfig; a machine that replays may lack its packages
    is_gap: bool = False
    model: str = ""
    observation: Observation | None = None
    decision: Decision | None = None
    other_gpus: int = 0


def replay(config: PlannerConfig | None, lines: Iterable[bytes | str]) -> Iterator[Recorded]:
    """Repeats the decisions of a record from its observations. `config`: replaces the recorded
    configurations. Raises ConfigError for a malformed line, unless a killed planner left it unfinished, and
    for a missing profile."""
    settings = config or PlannerConfig()
    states: dict[str, PlannerState] = {}
    profiles: dict[str, EngineProfile] = {}
    observations: dict[str, list[Observation]] = {}
    for number, entry in _entries(lines):
        if entry.config is not None and config is None:
            try:
                settings = msgspec.convert(entry.config, PlannerConfig)
            except (msgspec.MsgspecError, ConfigError) as error:
                raise _unreadable(number, error) from None
        if entry.config is not None:  # A new planner starts here, without the previous one's state.
            for known in (states, profiles, observations):
                known.clear()
        elif entry.is_gap:
            observations.clear()
        elif entry.observation is not None:
            observations.setdefault(entry.model, []).append(entry.observation)
        elif entry.decision is not None and observations.get(entry.model):
            if entry.model not in states:
                profiles |= read_profiles(settings, [entry.model])
            decision, states[entry.model] = decide(
                settings,
                states.get(entry.model, PlannerState()),
                observations.pop(entry.model),
                other_gpus=entry.other_gpus,
                profile=profiles.get(entry.model),
            )
            yield Recorded(model=entry.model, decision=decision, other_gpus=entry.other_gpus)


def _entries(lines: Iterable[bytes | str]) -> Iterator[tuple[int, Recorded]]:
    """Yields the lines that are not empty, with their numbers. A planner that was killed, or whose disk was
    full, may have left an unfinished last line: it is skipped with a warning at the end of the record, and
    before the start of another planner. Raises ConfigError for any other malformed line."""
    half: ConfigError | None = None  # the error of the previous line, if it is unfinished JSON
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Recorded)
        except msgspec.ValidationError as error:
            raise half or _unreadable(number, error) from None
        except msgspec.DecodeError as error:
            if half is not None:
                raise half from None
            half = _unreadable(number, error)
            continue
        if half is not None:
            if entry.config is None:
                raise half
            _pass_over(half)
            half = None
        yield number, entry
    if half is not None:
        _pass_over(half)


def _pass_over(half: ConfigError) -> None:
    logger.warning("%s; its planner ended while writing it, and the line is skipped", half)


def _unreadable(number: int, error: Exception) -> ConfigError:
    return ConfigError(f"line {number} of the record cannot be read: {error}")
