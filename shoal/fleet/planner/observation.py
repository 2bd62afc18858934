"""`Observation`: a model's workers at a moment, the planner's input; `Decision`: its output. pool/fleet.py
and the simulator observe; planner.py decides by load_rules.py or sla_rules.py."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.fleet.traffic import Traffic

DECODE_ROLES = ("both", "decode")
WAITING_LOAD = 0.02  # added KV load for each request that waits at a worker


class DecodeLoad(msgspec.Struct, frozen=True):
    """The load of a worker with the role decode or both. `num_waiting` counts only if the worker reports used
    slots (`has_slots`)."""

    kv_usage: float  # 0 to 1
    num_waiting: int = 0
    has_slots: bool = True

    @property
    def kv_load(self) -> float:
        return self.kv_usage + WAITING_LOAD * self.num_waiting * self.has_slots


class Failure(msgspec.Struct, frozen=True):
    """A change of one worker that has failed `times` times in a row, the last time at `at`."""

    role: str
    count: int  # 1: add; -1: remove; 0: change the role
    times: int
    at: float  # seconds, by the clock of the observations


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One model's workers at a moment. `prefill_workers` and `decode` have only ready workers. `decode_role`:
    "both" without separate prefill workers. `pending`: workers that start or end, or that have died and will
    be replaced. `paused`: workers that an operator has paused, put to sleep or holds for a command to all,
    such as an update of weights, which needs an unchanged fleet. The planner decides nothing while either is
    above 0. `draining`: workers that an operator drains; they keep their GPUs. `failures`: failed changes
    that have not succeeded since."""

    at: float  # seconds, any clock
    decode: list[DecodeLoad]
    decode_role: str = "both"
    prefill_workers: int = 0
    prefill_queue: int = 0
    queued: int = 0  # requests that the router holds until a worker has room
    pending: int = 0
    paused: int = msgspec.field(default=0, name="resting")  # the key in records of earlier versions
    draining: int = 0
    failures: list[Failure] = []
    traffic: Traffic = msgspec.field(default_factory=Traffic)  # since the router's start; for mode "sla"

    def __post_init__(self) -> None:
        if self.decode_role not in DECODE_ROLES:  # in a record
            raise ValueError(
                f"decode_role must be one of {', '.join(DECODE_ROLES)}, got {self.decode_role!r:.40}"
            )

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the router or at a worker."""
        return self.queued + self.prefill_queue + sum(load.num_waiting for load in self.decode)


class CountChange(msgspec.Struct, frozen=True):
    role: str
    count: int  # workers to add, or, below 0, to remove


class Move(msgspec.Struct, frozen=True):
    """`count` workers change their role, without a restart."""

    role: str
    to: str
    count: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The changes and their reason. `desired`: workers by role after all changes."""

    at: float
    changes: list[CountChange]
    reason: str
    desired: dict[str, int]
    moves: list[Move] = []


def counts_of(observation: Observation) -> dict[str, int]:
    """Returns the number of workers by role, including prefill if it is separate from decode."""
    counts = {observation.decode_role: len(observation.decode)}
    if observation.prefill_workers or observation.decode_role == "decode":
        counts["prefill"] = observation.prefill_workers
    return counts


def blocked_reason_of(observations: Sequence[Observation]) -> str | None:
    """Returns the reason why nothing can be decided now, or None."""
    if observations[-1].pending:
        return f"{observations[-1].pending} workers are starting or ending"
    if observations[-1].paused:
        return f"{observations[-1].paused} workers are paused, asleep or held by a command"
    sizes = {(each.prefill_workers, len(each.decode)) for each in observations}
    if len(sizes) > 1:
        return "workers started or ended in this interval, so its averages are not valid"
    return None
