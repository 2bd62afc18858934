"""`Fetches`: the KV blocks that are on their way to the device, from lower tiers or other workers. It asks
the sources for what a sequence lacks, and makes what has arrived findable.

sequence_blocks.py has all other blocks of the sequences. An engine without sources has no fetches.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal.engine.scheduling.sequence import Sequence
from shoal.hashing import keys_with_tail
from shoal.kv.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one sequence that a source is copying to the device:

        block_ids    [ held before `start` ][ start ... start + len(keys): on their way ][ others ]

    From its begin to its end the fetch has its own references on the blocks on their way and on all blocks
    before them (`held_blocks`). So no other sequence can get these blocks meanwhile, even if this sequence
    ends or is preempted."""

    seq: Sequence
    start: int  # the first block on its way, counted in the sequence's blocks
    keys: list[bytes]  # keys of the blocks on their way
    # number of full blocks among them; a block after these has the tail, up to the sequence's last token
    num_full: int
    held_blocks: list[int]  # blocks with a reference of this fetch
    num_asked: int  # sources that have been asked; the ones after these are asked for the blocks after these
    findable: bool = True  # whether others may find the blocks when they have arrived; not after a reset

    @property
    def blocks(self) -> list[int]:
        """The blocks on their way."""
        return self.held_blocks[self.start : self.start + len(self.keys)]

    def brings_half(self, keys: list[bytes], index: int, end: int) -> bool:
        """Returns whether at least half of the fetch's blocks are of use to a sequence with these keys, which
        lacks its blocks from `index` on and looks up those before `end`. A source fetches blocks only where
        that is quicker than to compute them, so a wait for half of them takes at most twice as long as
        computing them."""
        middle = index + (self.num_full + 1) // 2 - 1  # the block that makes it half of the fetch
        is_within = middle < min(end, self.start + self.num_full)
        return is_within and keys[middle] == self.keys[middle - self.start]


class Source(Protocol):
    """A source of blocks that the device lacks: lower tiers (engine/offload/offloader.py), or other workers
    (engine/peers/reader.py)."""

    def lookup(self, keys: abc.Sequence[bytes], start: int) -> int:
        """Returns how many of the first blocks of keys[start:] this source has and are worth fetching now.
        The last key may be a tail's (hashing.py), which only other workers have."""
        ...

    def begin(self, fetch: Fetch) -> None:
        """Begins a fetch. Scheduler.fetched ends it, some time later."""
        ...


class Fetches:
    """The fetches of one engine. It writes a sequence's `fetch`, and where one ends also `num_computed`,
    `num_cached_tokens` and `register_at`.

    `register(seq, keys, start, blocks)` enters full blocks into the prefix cache; `release(blocks)` drops
    references."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        register: Callable[[Sequence, list[bytes], int, list[int]], None],
        release: Callable[[abc.Sequence[int]], None],
    ) -> None:
        self.sources: list[Source] = []  # in the order in which they are asked for missing blocks
        self.under_way: list[Fetch] = []  # also for sequences that have left meanwhile
        self.num_queries = 0  # tokens looked up in the sources
        self.num_hits = 0
        self._pool, self._block_size = pool, block_size
        self._register, self._release = register, release
        # key of a block -> the newest fetch that will make it findable
        self._arriving: dict[bytes, Fetch] = {}

    def begin(self, seq: Sequence) -> bool:
        """Starts a fetch of the missing blocks of a sequence that has just started, from the first source
        that has them. Returns whether the sequence waits for it."""
        if not self.sources:
            return False
        if seq.was_prefetched:
            seq.was_prefetched = False
            return False
        if seq.num_admissions == 1:
            self.num_queries += seq.num_tokens - seq.num_computed
        return self._begin(seq, seq.num_computed // self._block_size, 0)

    def _begin(self, seq: Sequence, start: int, num_asked: int) -> bool:
        """Starts a fetch from the first source after `num_asked` others that has the next block. When it
        ends, the sources after that one are asked for blocks still missing."""
        num_tokens, size = seq.num_tokens - 1, self._block_size
        keys = keys_with_tail(seq.keys, seq.root, seq.token_ids[:num_tokens], size)
        for i, source in enumerate(self.sources[num_asked:], num_asked + 1):
            num_blocks = source.lookup(keys, start)
            if num_blocks:
                end = start + num_blocks
                num_full = min(end, num_tokens // size) - start
                fetch = Fetch(seq, start, keys[start:end], num_full, seq.block_ids[:end], i)
                seq.fetch = fetch
                self._pool.hold(fetch.held_blocks)
                self.under_way.append(fetch)
                self._arriving.update(dict.fromkeys(fetch.keys[:num_full], fetch))
                source.begin(fetch)
                return True
        return False

    def arriving(self, key: bytes) -> Fetch | None:
        """Returns the newest fetch that will make a block findable."""
        return self._arriving.get(key)

    def arrived(self, fetch: Fetch, num_blocks: int) -> None:
        """Ends a fetch whose first `num_blocks` blocks have arrived intact. If its sequence still waits for
        it, the sources after this one are asked for the other blocks."""
        self.under_way.remove(fetch)
        num_full = min(num_blocks, fetch.num_full)
        if fetch.findable:
            for key in fetch.keys[: fetch.num_full]:
                if self._arriving.get(key) is fetch:
                    del self._arriving[key]
            self._register(fetch.seq, fetch.keys[:num_full], fetch.start, fetch.blocks[:num_full])
        seq = fetch.seq
        is_wanted = seq.fetch is fetch  # otherwise the sequence has ended or was preempted meanwhile
        if is_wanted:
            seq.fetch = None
            # A block that is not full has the tokens up to the last, which is always computed.
            end = min((fetch.start + num_blocks) * self._block_size, seq.num_tokens - 1)
            num_tokens = end - seq.num_computed
            seq.num_computed = end
            if fetch.findable:
                # The full blocks that have arrived are findable already.
                seq.register_at += num_full * self._block_size
            if seq.num_admissions == 1:
                seq.num_cached_tokens += num_tokens
                self.num_hits += num_tokens
        self._release(fetch.held_blocks)
        if is_wanted and fetch.findable:
            self._begin(seq, fetch.start + num_blocks, fetch.num_asked)

    def forget(self) -> None:
        """Keeps what is on its way out of the prefix cache, which was reset."""
        for fetch in self.under_way:
            fetch.findable = False
        self._arriving.clear()

    def held(self) -> Iterable[list[int]]:
        """Returns the blocks that the fetches hold."""
        return (fetch.held_blocks for fetch in self.under_way)

    def check(self, running: abc.Sequence[Sequence]) -> None:
        """Checks that each fetch that a sequence waits for is under way. Raises AssertionError."""
        waited_for = [seq.fetch for seq in running if seq.fetch is not None]
        assert all(fetch in self.under_way for fetch in waited_for), "fetches and waiting sequences differ"
