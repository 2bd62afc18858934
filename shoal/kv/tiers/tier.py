"""The protocol of a tier below host memory.

Two exist: a folder on disk (kv/tiers/disk.py) and a store that engines share (kv/tiers/store.py).
kv/tiers/registry.py opens them and has their order. How to add one: docs/howto/tier.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from shoal.kv.tiers.block_file import BlockMeta, Event


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier of one rank: its state now, then counts since the start."""

    blocks: int
    num_bytes: int  # in the blocks' files and in writes in progress
    capacity_bytes: int  # 0: unknown
    capacity_blocks: int  # how many fit, with each file's header and padding; 0: unknown
    pending: int  # reads and writes that wait or run
    written: int
    read: int
    evicted: int
    # writes (of a store, any calls) that were not tried: too many waited, or the tier pauses after an error
    refused: int
    problems: dict[str, int]  # by kind; each cost a block, none a wrong answer


class Tier(Protocol):
    """Blocks of one rank, by key, outside of its device and host memory. Thread-safe.

    A tier may be slow or fail, and never raises: a call that fails answers with "no". Every read verifies all
    bytes, so a wrong block is never served. Buffers must stay as they are until the future of their read
    or write is done; a future is done in bounded time and is never in error.
    """

    @property
    def must_be_asked(self) -> bool:
        """True: `contains` knows only the keys of recent look_up() calls, so a prompt waits for a look_up
        before it is scheduled."""
        ...

    def contains(self, key: bytes) -> bool:
        """Says if the block is there, as far as known. Called between steps: no I/O."""
        ...

    def look_up(self, keys: Sequence[bytes]) -> Future[int]:
        """Returns how many of the first keys are there. `contains` knows them when the future is done."""
        ...

    def write(self, meta: BlockMeta, data: memoryview) -> Future[bool]:
        """Stores a block; the result says if it is in the tier. `data`: the rank's share of the block, in
        bytes."""
        ...

    def read(self, meta: BlockMeta, into: memoryview) -> Future[bool]:
        """Reads a block; the result says if it is in `into`, every byte verified. If not, `into` has
        undefined content."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forgets these blocks: they can't be found any more."""
        ...

    def reset(self) -> None:
        """Forgets all blocks, unless other engines use them too."""
        ...

    def take_events(self) -> list[Event]:
        """Returns the blocks stored and removed since the last call, in order. Empty if events are not
        recorded, or if other engines share the tier."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Drops waiting jobs and waits for running ones, in bounded time."""
        ...
