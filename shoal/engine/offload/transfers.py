"""`Transfers`: copies, writes and reads of KV blocks during the steps, commanded on all ranks. offloader.py
asks for them; engine/runner/rank_kv.py does the work of each rank.

    device block  --copy out-->  host block of the slab  --write-->  file on disk, object in a store
    device block  <--copy in---  host block              <--read---

A transfer begins with a ticket, a number that counts up, and ends some time later: `poll` reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVarTuple

from shoal.engine.ranks.ranks import Ranks
from shoal.engine.ranks.workers import Pending
from shoal.engine.runner import commands
from shoal.engine.runner.commands import Command
from shoal.kv.tiers.block_file import BlockMeta

Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that has ended on every rank. `intact` says for each of its blocks whether it arrived.
    `seconds` is how long the transfer took on the slowest rank, without the wait for its turn."""

    ticket: int
    intact: Sequence[bool]
    seconds: float = 0.0


class Transfers(Protocol):
    """The first four methods begin a transfer and return its ticket. Blocks and host blocks go pairwise.

    With `wait` a copy begins when all steps launched so far have run. A copy in begins when the copy out
    `after` has ended too; 0 stands for none.
    """

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int], wait: bool) -> int: ...
    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int], wait: bool, after: int) -> int: ...
    def write(self, tier: str, metas: Sequence[BlockMeta], host_blocks: Sequence[int]) -> int: ...
    def read(self, tier: str, metas: Sequence[BlockMeta], host_blocks: Sequence[int]) -> int: ...

    def order_after(self, ticket: int) -> None:
        """Steps and copies that are launched from now on run after this copy out."""
        ...

    def disown(self, tier: str, keys: Sequence[bytes]) -> None:
        """Drops blocks that are missing on at least one rank from all ranks' tiers."""
        ...

    def forget(self, tier: str) -> None:
        """Resets a tier on every rank (Tier.reset)."""
        ...

    def poll(self) -> list[Done]:
        """The transfers that have ended since the last call."""
        ...

    def take_ready(self) -> list[int]:
        """Host blocks whose memory can be used from now on, on every rank."""
        ...


class RankTransfers:
    """Transfers of one engine's ranks. With one rank a transfer ends when that rank says so, with several
    when all have said so."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._last_ticket = 0
        self._replies: Pending[dict[str, Any]] | None = None  # the other ranks' replies to the last poll
        self._reports: dict[int, list[Done]] = {}  # by ticket; some rank has not ended the transfer yet
        self._num_ready: dict[int, int] = {}  # host block -> ranks where it is ready, while not all are
        self._ready: list[int] = []  # ready on every rank, and not yet taken
        self._taken: list[int] = []  # host blocks that take_ready has returned

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int], wait: bool) -> int:
        return self._begin(commands.KV_COPY_OUT, list(blocks), list(host_blocks), wait)

    def copy_in(self, host_blocks: Sequence[int], blocks: Sequence[int], wait: bool, after: int) -> int:
        return self._begin(commands.KV_COPY_IN, list(host_blocks), list(blocks), wait, after)

    def write(self, tier: str, metas: Sequence[BlockMeta], host_blocks: Sequence[int]) -> int:
        return self._begin(commands.KV_WRITE, tier, [meta.to_plain() for meta in metas], list(host_blocks))

    def read(self, tier: str, metas: Sequence[BlockMeta], host_blocks: Sequence[int]) -> int:
        return self._begin(commands.KV_READ, tier, [meta.to_plain() for meta in metas], list(host_blocks))

    def order_after(self, ticket: int) -> None:
        self._ranks.send(commands.KV_ORDER_AFTER, ticket)

    def disown(self, tier: str, keys: Sequence[bytes]) -> None:
        if self._ranks.size > 1:  # a single rank's tier knows
            self._ranks.send(commands.KV_FORGET, tier, list(keys))

    def forget(self, tier: str) -> None:
        self._ranks.send(commands.KV_FORGET, tier, None)

    def take_ready(self) -> list[int]:
        ready, self._ready = self._ready, []
        self._taken += ready
        return ready

    def abandon(self) -> None:
        """Waits for the transfers under way and drops their results; take_ready starts again. For one rank.
        Raises TimeoutError if a transfer does not end."""
        self._ranks.runner.kv.abandon()
        self._reports.clear()
        self._ready += self._taken
        self._taken.clear()

    def poll(self) -> list[Done]:
        reports = [self._ranks.runner.kv.poll()]
        if self._replies is not None and self._replies.complete:
            reports += self._replies.results()
            self._replies = None
        if self._replies is None:
            self._replies = self._ranks.ask_others(commands.KV_POLL)
        ended: list[Done] = []
        for report in reports:
            for start, end in report["ready"]:
                for host_block in range(start, end):
                    self._is_ready_on_a_rank(host_block)
            for ticket, intact, seconds in report["done"]:
                of_ranks = self._reports.setdefault(ticket, [])
                of_ranks.append(Done(ticket, intact, seconds))
                if len(of_ranks) == self._ranks.size:
                    del self._reports[ticket]
                    ended.append(_all_of(of_ranks))
        return ended

    def _is_ready_on_a_rank(self, host_block: int) -> None:
        num_ranks = self._num_ready.get(host_block, 0) + 1
        self._num_ready[host_block] = num_ranks
        if num_ranks == self._ranks.size:
            del self._num_ready[host_block]
            self._ready.append(host_block)

    def _begin(self, command: Command[None, int, *Arguments], *args: *Arguments) -> int:
        self._last_ticket += 1
        self._ranks.send(command, self._last_ticket, *args)
        return self._last_ticket


def _all_of(of_ranks: list[Done]) -> Done:
    intact = [all(of_block) for of_block in zip(*(done.intact for done in of_ranks))]
    return Done(of_ranks[0].ticket, intact, max(done.seconds for done in of_ranks))
