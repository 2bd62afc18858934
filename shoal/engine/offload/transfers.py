"""What the tiers ask of whoever moves blocks, and the rank-0 end of it. What each rank does:
engine/runner/rank_kv.py.

device block  --copy out-->  slot of the host slab  --write-->  file on disk, object in a store
device block  <--copy in---  slot                   <--read---
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVarTuple

from shoal.engine.ranks.ranks import Ranks
from shoal.engine.ranks.workers import Pending
from shoal.engine.runner import commands
from shoal.engine.runner.commands import Command
from shoal.kv.block_file import BlockMeta

Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that has ended on every rank. `intact`: for each of its blocks. `seconds`: that it took,
    without the wait for its turn."""

    ticket: int
    intact: Sequence[bool]
    seconds: float = 0.0


class Transfers(Protocol):
    """The first four begin something and return its ticket. `wait`: a copy begins when all steps launched so
    far have run; `behind`: when this copy out has ended too, if it is not 0."""

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int], wait: bool) -> int: ...
    def copy_in(self, slots: Sequence[int], blocks: Sequence[int], wait: bool, behind: int) -> int: ...
    def write(self, tier: str, metas: Sequence[BlockMeta], slots: Sequence[int]) -> int: ...
    def read(self, tier: str, metas: Sequence[BlockMeta], slots: Sequence[int]) -> int: ...

    def order_behind(self, ticket: int) -> None:
        """What is launched from now on, steps and copies, runs after this copy."""
        ...

    def disown(self, tier: str, keys: Sequence[bytes]) -> None:
        """Some rank has not got these: none is to find them."""
        ...

    def forget(self, tier: str) -> None:
        """Everything."""
        ...

    def poll(self) -> list[Done]:
        """Those that have ended since the last call."""
        ...

    def take_ready_slots(self) -> list[int]:
        """Slots whose memory can be used from now on."""
        ...


class RankTransfers:
    """Has every rank do its part. Tickets of one rank end when its own poll says so; of several, when all
    have said so."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._last = 0
        self._replies: Pending[dict[str, Any]] | None = None
        self._told: dict[int, list[Done]] = {}  # by the ranks that have ended it, while some have not
        self._ready: dict[int, int] = {}  # slot -> ranks where it is
        self._usable: list[int] = []  # not announced yet
        self._announced: list[int] = []

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int], wait: bool) -> int:
        return self._begin(commands.KV_COPY_OUT, list(blocks), list(slots), wait)

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int], wait: bool, behind: int) -> int:
        return self._begin(commands.KV_COPY_IN, list(slots), list(blocks), wait, behind)

    def write(self, tier: str, metas: Sequence[BlockMeta], slots: Sequence[int]) -> int:
        return self._begin(commands.KV_WRITE, tier, [meta.to_plain() for meta in metas], list(slots))

    def read(self, tier: str, metas: Sequence[BlockMeta], slots: Sequence[int]) -> int:
        return self._begin(commands.KV_READ, tier, [meta.to_plain() for meta in metas], list(slots))

    def order_behind(self, ticket: int) -> None:
        self._ranks.send(commands.KV_ORDER_BEHIND, ticket)

    def disown(self, tier: str, keys: Sequence[bytes]) -> None:
        if self._ranks.size > 1:  # a single rank's tier knows
            self._ranks.send(commands.KV_FORGET, tier, list(keys))

    def forget(self, tier: str) -> None:
        self._ranks.send(commands.KV_FORGET, tier, None)

    def take_ready_slots(self) -> list[int]:
        usable, self._usable = self._usable, []
        self._announced += usable
        return usable

    def abandon(self) -> None:
        """Waits for what is under way, of which nobody is told; slots are announced anew. For one rank."""
        self._ranks.runner.kv.abandon()
        self._told.clear()
        self._usable += self._announced
        self._announced.clear()

    def poll(self) -> list[Done]:
        reports = [self._ranks.runner.kv.poll()]
        if self._replies is not None and self._replies.complete:
            reports += self._replies.results()
            self._replies = None
        if self._replies is None:
            self._replies = self._ranks.ask_others(commands.KV_POLL)
        ended = []
        for report in reports:
            for slot in (slot for start, end in report["ready"] for slot in range(start, end)):
                self._ready[slot] = self._ready.get(slot, 0) + 1
                if self._ready[slot] == self._ranks.size:
                    self._usable.append(slot)
                    del self._ready[slot]
            for ticket, intact, seconds in report["done"]:
                told = self._told.setdefault(ticket, [])
                told.append(Done(ticket, intact, seconds))
                if len(told) == self._ranks.size:
                    del self._told[ticket]
                    ended.append(_all_of(told))
        return ended

    def _begin(self, command: Command[None, int, *Arguments], *args: *Arguments) -> int:
        self._last += 1
        self._ranks.send(command, self._last, *args)
        return self._last


def _all_of(told: list[Done]) -> Done:
    intact = [all(of_block) for of_block in zip(*(done.intact for done in told))]
    return Done(told[0].ticket, intact, max(done.seconds for done in told))
