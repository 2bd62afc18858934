"""What a tier below host memory is: the protocol through which engines reach every one of them.

Two exist, a folder on disk (kv/tiers/disk.py) and a store that engines share (kv/tiers/store.py). Which
are open, and in
which order they are asked, says kv/tiers/registry.py. How to add one: docs/howto/tier.md.
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
    num_bytes: int  # that the blocks take, writes under way included
    capacity_bytes: int  # 0: unknown
    capacity_blocks: int  # how many it has room for, with all that a block's file takes; 0: unknown
    pending: int  # reads and writes that wait or run
    written: int
    read: int
    evicted: int
    # writes (of a store, any calls) that were not tried: too many waited, or the tier rests after an error
    refused: int
    problems: dict[str, int]  # by kind; each cost a block, none a wrong answer


class Tier(Protocol):
    """Blocks of one rank, by key, outside of its device and host memory. Thread-safe.

    A tier may be slow or fail, and never raises: a call that fails answers with "no". Whoever reads verifies
    every byte, so a wrong block is never served. Buffers must stay as they are until the future of their read
    or write is done; a future is done in bounded time and is never in error.
    """

    @property
    def must_be_asked(self) -> bool:
        """Whether `contains` knows only what look_up() has asked for lately. A prompt then waits for a
        look_up before it is scheduled."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether the block is there, as far as known. Called between steps: no I/O."""
        ...

    def look_up(self, keys: Sequence[bytes]) -> Future[int]:
        """How many of the first keys are there. `contains` knows them when the future is done."""
        ...

    def write(self, meta: BlockMeta, data: memoryview) -> Future[bool]:
        """Whether the block is in the tier. `data`: the rank's share of the block, in bytes."""
        ...

    def read(self, meta: BlockMeta, into: memoryview) -> Future[bool]:
        """Whether the block is in `into`, every byte verified. If not, `into` holds anything."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """These blocks can't be found any more."""
        ...

    def reset(self) -> None:
        """All blocks are forgotten, unless other engines use them too."""
        ...

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call, in order. Empty if events are not recorded, or
        the tier's content is not this engine's alone."""
        ...

    def stats(self) -> TierStats: ...

    def flush(self, timeout_s: float) -> int:
        """Waits for the writes under way, no longer than this. Returns how many are left."""
        ...

    def close(self) -> None:
        """Drops what waits, lets what runs come to its end, in bounded time."""
        ...
