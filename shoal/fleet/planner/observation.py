"""What a planner sees of a model's workers, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.fleet.traffic import Traffic

DECODE_ROLES = ("both", "decode")
WAITING_LOAD = 0.02  # of KV load, for each request that waits at a worker


class DecodeLoad(msgspec.Struct, frozen=True):
    """One decode worker, or one that does both. `num_waiting` counts where the worker tells of slots that are
    taken (`has_slots`)."""

    kv_usage: float  # 0 to 1
    num_waiting: int = 0
    has_slots: bool = True

    @property
    def kv_load(self) -> float:
        return self.kv_usage + WAITING_LOAD * self.num_waiting * self.has_slots


class Failure(msgspec.Struct, frozen=True):
    """A change of one worker that has failed so many times in succession, the last time at `at`."""

    role: str
    count: int  # 1: it was to be added; -1: to be removed; 0: to change its role
    times: int
    at: float  # seconds, by the clock of the observations


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One model's workers at a moment. Only workers that are ready count in `prefill_workers` and `decode`.
    `decode_role`: "both" where prefill and decode are not apart. `pending`: workers that are being started or
    removed, or have died and will be replaced. `resting`: workers that an operator has paused, put to sleep
    or holds for a command to all; who does so may need all to stay as it is, for new weights, say. While
    there are any of either, nothing is decided. `draining`: workers that get nothing new by an operator's
    word; they keep their GPUs. `failures`: changes that the planner has tried and that have not been done
    since."""

    at: float  # seconds, any clock
    decode: list[DecodeLoad]
    decode_role: str = "both"
    prefill_workers: int = 0
    prefill_queue: int = 0
    queued: int = 0  # requests that the router holds until a worker has room
    pending: int = 0
    resting: int = 0
    draining: int = 0
    failures: list[Failure] = []
    traffic: Traffic = msgspec.field(default_factory=Traffic)  # since the router's start; for mode "sla"

    def __post_init__(self) -> None:
        if self.decode_role not in DECODE_ROLES:  # in a record
            raise ValueError(f"decode_role {self.decode_role!r:.40} is none of {', '.join(DECODE_ROLES)}")

    @property
    def num_waiting(self) -> int:
        """Requests that wait anywhere."""
        return self.queued + self.prefill_queue + sum(load.num_waiting for load in self.decode)


class CountChange(msgspec.Struct, frozen=True):
    role: str
    count: int  # so many workers to be added, or, below 0, to be removed


class Move(msgspec.Struct, frozen=True):
    """So many workers change their role, without a restart."""

    role: str
    to: str
    count: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What should change, and why. `desired`: workers by role when all of it is done."""

    at: float
    changes: list[CountChange]
    reason: str
    desired: dict[str, int]
    moves: list[Move] = []


def counts_of(observation: Observation) -> dict[str, int]:
    """Workers by role; prefill is a role where it is apart from decode."""
    counts = {observation.decode_role: len(observation.decode)}
    if observation.prefill_workers or observation.decode_role == "decode":
        counts["prefill"] = observation.prefill_workers
    return counts


def hindrance_of(observations: Sequence[Observation]) -> str | None:
    """Why nothing can be decided now, if so."""
    if observations[-1].pending:
        return f"{observations[-1].pending} workers are coming or going"
    if observations[-1].resting:
        return f"{observations[-1].resting} workers are paused, asleep or held, by a command to them"
    sizes = {(each.prefill_workers, len(each.decode)) for each in observations}
    if len(sizes) > 1:
        return "workers came or went in this interval, so its averages say nothing"
    return None
