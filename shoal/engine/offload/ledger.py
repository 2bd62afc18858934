"""`Ledger`: the shared state of the offloader's parts: host blocks, transfers under way, costs and counts. It
moves nothing: transfers.py does.

The parts are the Offloader itself (device to host), the Fetcher (all tiers to device) and the Writer (host to
persistent tiers). All of them run in rank 0's main thread, between steps.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.engine.offload.costs import Costs
from shoal.engine.offload.transfers import Done, Transfers
from shoal.engine.scheduling.sequence import Sequence
from shoal.kv.groups import LayerGroup
from shoal.kv.places import Place, key_of
from shoal.kv.tiers.block_file import BlockMeta
from shoal.kv.tiers.host import HostTier
from shoal.stats import KvTierStats

HOST = "host"  # the host tier's name in rates, stats and metrics


@dataclass(slots=True)
class Ledger:
    """`under_way`: for each ticket, the host blocks that the transfer uses and the callback for its end."""

    host: HostTier
    transfers: Transfers
    # With a host tier, host blocks keep what is copied there. Without one they are a staging area on the way
    # to and from the persistent tiers.
    has_host_tier: bool
    costs: Costs
    stats: dict[str, KvTierStats]  # by tier
    clock: Callable[[], float]
    epoch: int = 0  # number of resets; blocks of a transfer that began in an earlier epoch are dropped
    under_way: dict[int, tuple[list[int], Callable[[Done], None]]] = field(default_factory=dict)
    num_launched: int = 0  # steps
    num_completed: int = 0  # steps that have run, as far as the host knows; they end in order
    # For each device block that a sequence has released: the number of steps launched by then
    used_until: dict[int, int] = field(default_factory=dict)

    def track(self, ticket: int, host_blocks: list[int], then: Callable[[Done], None]) -> None:
        """Adds a transfer that has begun."""
        self.under_way[ticket] = host_blocks, then

    def complete(self, done: Done) -> None:
        """Removes a transfer that has ended, and calls its callback."""
        self.under_way.pop(done.ticket)[1](done)

    def in_use(self, blocks: Iterable[int]) -> bool:
        """True if a step in flight may read or write one of these device blocks, which no sequence had when
        they were taken."""
        return any(self.used_until.get(block, 0) > self.num_completed for block in blocks)


def part_meta(key: bytes, groups: abc.Sequence[LayerGroup]) -> BlockMeta:
    """Returns what proves a part of a snapshot of states to be the right one: its key alone, which is derived
    from all tokens up to the snapshot."""
    return BlockMeta(key, None, (), group=len(groups))


def meta_of(seq: Sequence, place: Place, groups: abc.Sequence[LayerGroup], block_size: int) -> BlockMeta:
    """Returns the key, parent and tokens of the sequence's full block at a place. The keys of its tokens, one
    for each `block_size`, must be known."""
    size, number = groups[place.group].block_size, place.number
    tokens = array("I", seq.token_ids[number * size : (number + 1) * size])
    before = Place(place.group, number - 1)
    parent = key_of(before, groups, seq.keys, block_size) if number else None
    key = key_of(place, groups, seq.keys, block_size)
    return BlockMeta(key, parent, tokens, (seq.request.adapter, seq.request.cache_salt), place.group)
