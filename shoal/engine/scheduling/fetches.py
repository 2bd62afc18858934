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
from shoal.kv.places import Place
from shoal.kv.snapshots import StateSnapshot


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one sequence that a source is copying to the device. With one table they are

        block_ids    [ held before `start` ][ start ... start + len(keys): on their way ][ others ]

    From its begin to its end the fetch has its own references on the blocks on their way and on all blocks
    before them (`held_blocks`). So no other sequence can get these blocks meanwhile, even if this sequence
    ends or is preempted."""

    seq: Sequence
    start: int  # the first block on its way, counted in the sequence's chain of keys
    end: int  # number of tokens that are computed when all blocks have arrived
    # the chain's keys that others can wait for, from `start` on: of the full blocks
    chain: list[bytes]
    # The blocks on their way: their places in the sequence's tables, their keys and the blocks themselves. A
    # block that is not full has the tail, up to the sequence's last token.
    places: list[Place]
    keys: list[bytes]
    blocks: list[int]
    held_blocks: list[int]  # blocks with a reference of this fetch
    taken: list[int]  # the blocks that the sequence did not find in the cache
    num_asked: int  # sources that have been asked; the ones after these are asked for the blocks after these
    findable: bool = True  # whether others may find the blocks when they have arrived; not after a reset
    needs_all: bool = False  # blocks of several tables are of use only together
    # with recurrent layers: the one at the end, whose blocks are the last if it is on its way
    snapshot: StateSnapshot | None = None

    def brings_enough(self, keys: list[bytes], index: int, end: int) -> bool:
        """Returns whether at least half of the fetch's blocks are of use to a sequence with these keys, which
        lacks its blocks from `index` on and looks up those before `end`. A source fetches blocks only where
        that is quicker than to compute them, so a wait for half of them takes at most twice as long as
        computing them. Where the blocks are of use only together, all of them must be."""
        num_full = len(self.chain)
        # the block that makes it enough
        last = self.start + num_full - 1 if self.needs_all else index + (num_full + 1) // 2 - 1
        is_within = last < min(end, self.start + num_full)
        return is_within and keys[last] == self.chain[last - self.start]


class Source(Protocol):
    """A source of blocks that the device lacks: lower tiers (engine/offload/offloader.py), or other workers
    (engine/peers/reader.py)."""

    def lookup(self, keys: abc.Sequence[bytes], start: int, num_tokens: int | None = None) -> int:
        """Returns how many of the first blocks of keys[start:] this source has and are worth fetching now;
        the device has those of keys[:start]. The last key may be a tail's (hashing.py), which only other
        workers have. With `num_tokens` the blocks are of use only together, in place of computing that many
        tokens: returns the number of all of them, or 0."""
        ...

    def has(self, key: bytes) -> bool:
        """Returns whether this source has a block."""
        ...

    def begin(self, fetch: Fetch) -> None:
        """Begins a fetch. Scheduler.fetched ends it, some time later."""
        ...


class Fetches:
    """The fetches of one engine, for a model whose layers share all blocks. grouped_fetches.py has the
    subclass for models with several groups of layers. It writes a sequence's `fetch`, and where one ends also
    `num_computed`, `num_cached_tokens` and `register_at`.

    `register(seq, keys, start, blocks)` enters full blocks into the prefix cache; `release(blocks)` drops
    references."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        register: Callable[..., None],
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
                # A block that is not full has the tokens up to the last, which is always computed.
                self._add(
                    source,
                    Fetch(
                        seq,
                        start,
                        min(end * size, num_tokens),
                        keys[start : start + num_full],
                        [Place(0, index) for index in range(start, end)],
                        keys[start:end],
                        seq.block_ids[start:end],
                        seq.block_ids[:end],
                        seq.block_ids[start:],
                        i,
                    ),
                )
                return True
        return False

    def _add(self, source: Source, fetch: Fetch) -> None:
        fetch.seq.fetch = fetch
        self._pool.hold(fetch.held_blocks)
        self.under_way.append(fetch)
        self._arriving.update(dict.fromkeys(fetch.chain, fetch))
        source.begin(fetch)

    def arriving(self, key: bytes) -> Fetch | None:
        """Returns the newest fetch that will make a block findable."""
        return self._arriving.get(key)

    def arrived(self, fetch: Fetch, num_blocks: int) -> bool:
        """Ends a fetch whose first `num_blocks` blocks have arrived intact. If its sequence still waits for
        it, the sources after this one are asked for the other blocks. Returns False if the sequence must
        start again: it waits for blocks of which only all are of use, and some have not arrived. It will then
        find the ones that have, and no source is asked."""
        self.under_way.remove(fetch)
        seq, size, is_whole = fetch.seq, self._block_size, num_blocks == len(fetch.keys)
        end = fetch.end if is_whole else (fetch.start + num_blocks) * size
        if fetch.findable:
            for key in fetch.chain:
                if self._arriving.get(key) is fetch:
                    del self._arriving[key]
            self._make_findable(fetch, num_blocks)
        is_wanted = seq.fetch is fetch  # otherwise the sequence has ended or was preempted meanwhile
        is_usable = is_whole or not fetch.needs_all
        if is_wanted:
            seq.fetch = None
            seq.was_prefetched = not is_usable
        if is_wanted and is_usable:
            num_tokens = end - fetch.start * size
            seq.num_computed = end
            if fetch.findable:
                # The full blocks that have arrived are findable already.
                seq.register_at += (end // size - fetch.start) * size
            if seq.num_admissions == 1:
                seq.num_cached_tokens += num_tokens
                self.num_hits += num_tokens
        self._release(fetch.held_blocks)
        if is_wanted and is_usable and fetch.findable:
            self._begin(seq, -(-end // size), fetch.num_asked)
        return is_usable or not is_wanted

    def _make_findable(self, fetch: Fetch, num_blocks: int) -> None:
        """Enters the full ones of the first blocks into the prefix cache."""
        num_full = min(num_blocks, len(fetch.chain))
        self._register(fetch.seq, fetch.keys[:num_full], fetch.start, fetch.blocks[:num_full])

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
