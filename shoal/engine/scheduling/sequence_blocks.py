"""`SequenceBlocks`: which KV blocks each sequence has. It finds cached prefixes, gives sequences blocks,
makes computed blocks findable, and knows of the blocks that are lent to other workers.

scheduler.py decides who starts, grows and ends; kv/blocks.py counts references; fetches.py has the blocks
that are on their way from lower tiers and other workers. A block of a running sequence goes through these
states:

    start, grow --> held, not computed --> computed --> findable by other sequences --> release
                      |                                     ^
                      fetch --> on its way --> arrived -----+
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, abc

from shoal.engine.scheduling.fetches import Fetches
from shoal.engine.scheduling.part_state import StateCopies, Tail
from shoal.engine.scheduling.seams import BlockWatcher, SeqPart
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.hashing import common_length, extend_keys, keys_with_tail
from shoal.kv.blocks import BlockPool
from shoal.kv.groups import LayerGroup
from shoal.stats import Stats

NEVER = sys.maxsize  # `register_at` of a sequence whose blocks must stay out of the prefix cache


class SequenceBlocks:
    """The KV blocks of one engine's sequences, for a model whose layers share all blocks: each sequence has
    one table. grouped_blocks.py has the subclass for models with several groups of layers, and
    state_blocks.py the one for models with recurrent layers.

    A sequence that waits has no blocks. From `start` to `release` it has blocks for all its tokens, in order,
    and `grow` adds those that a decode needs. This class writes the sequence's `tables`, `room`, `keys`,
    `register_at`, `promised`, `fetch`, `num_admissions` and the counts of cached tokens, and `num_computed`
    where a start or a fetch brings computed blocks."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.block_size = self.largest = block_size  # tokens; `largest` of any block
        self.groups: tuple[LayerGroup, ...] = (LayerGroup((), block_size),)  # a sequence has a table for each
        self.room = num_blocks * block_size  # the most tokens that one sequence can have
        self.chunk = sys.maxsize  # the most tokens of one sequence that a step may compute
        self.watchers: list[BlockWatcher] = []
        self.fetches = Fetches(self.pool, block_size, self._register, self._release)
        self._held = Counter[int]()  # how often parts of the engine hold each block
        # key of a block -> how many of the sequences that compute prompts now will make it findable
        self._promised: dict[bytes, int] = {}
        # the prompt that was looked up last: its root, tokens and keys
        self._last_looked_up: tuple[bytes, list[int], list[bytes]] = b"", [], []
        self._num_queries = 0  # tokens looked up in the prefix cache
        self._num_hits = 0

    # A sequence's life

    def find(self, seq: Sequence) -> tuple[list[list[int]], int]:
        """Returns the tables of cached blocks of the sequence's longest prefix, and its number of tokens. The
        last token is left out: it is always computed, because its logits are needed to sample the next."""
        if not self._looks_up(seq):
            return [[]], 0
        self._extend_keys(seq)
        found = self.pool.match(seq.keys[: (seq.num_tokens - 1) // self.block_size])
        tail = seq.tail
        if tail is not None and self._follows(tail, seq, len(found)):
            return [[*found, tail.block]], min(tail.end, seq.num_tokens - 1)
        return [found], len(found) * self.block_size

    def lacks_room(self, seq: Sequence) -> bool:
        """Returns True if a waiting sequence cannot start now, as the blocks that it would take are not free.
        It looks at a few keys only, because the head of a blocked queue is asked in every step, and may have
        thousands of blocks."""
        pool, num_blocks = self.pool, -(-seq.num_tokens // self.block_size)
        if num_blocks <= pool.num_free:
            return False
        if not self._looks_up(seq):
            return True
        self._extend_keys(seq)
        # A block is findable only if all before it are, and the findable block of a content is held only if
        # all before it are held (kv/blocks.py). So the first that is not can be bisected. Findable blocks
        # that are free count as free.
        keys, indices = seq.keys, range((seq.num_tokens - 1) // self.block_size)
        num_held = bisect_left(
            indices, True, key=lambda i: (block := pool.find(keys[i])) is None or not pool.is_held(block)
        )
        num_found = bisect_left(indices, True, key=lambda i: pool.find(keys[i]) is None)
        if seq.tail is not None and self._follows(seq.tail, seq, num_found):
            num_held += 1
        return num_blocks - num_held > pool.num_free and not self.is_coming(seq, num_found)

    def is_coming(self, seq: Sequence, index: int) -> bool:
        """True if the sequence should wait for its block `index`, because another sequence computes or
        fetches it, and it will then be found in the cache. A block's key covers all tokens before it, so
        equal keys mean equal positions. A fetch is waited for only if at least half of its blocks are of use
        here."""
        end = (seq.num_tokens - 1) // self.block_size
        if not self._looks_up(seq) or index >= end:
            return False
        key = seq.keys[index]
        num_promises, fetch = self._num_promises(seq, index, end), self.fetches.arriving(key)
        if fetch is not None:
            if fetch.brings_enough(seq.keys, index, end):
                return True
            num_promises -= bool(fetch.seq.promised)  # the fetch will keep this one
        return num_promises > 0

    def fit(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Returns how many of the sequence's `num_tokens` prompt tokens from `start` on one step computes."""
        return min(num_tokens, self.chunk)

    def start(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        """Gives a waiting sequence blocks. The first of each table are `found`, with the KV of `num_cached`
        tokens. Returns False, with nothing changed, if there is no room for the others."""
        if not self._take(seq, found, num_cached):
            return False
        num_full, size = num_cached // self.block_size, self.block_size
        seq.tail = None
        seq.num_computed = num_cached
        seq.num_admissions += 1
        seq.register_at = NEVER
        if self.pool.enable_caching:
            seq.register_at = (num_full + 1) * size
            extend_keys(seq.keys, seq.root, seq.token_ids, size)
            seq.promised = seq.keys[num_full:]
            for key in seq.promised:
                self._promised[key] = self._promised.get(key, 0) + 1
        # A preempted sequence mostly finds its own blocks again, which do not count as hits.
        if seq.num_admissions == 1 and self._looks_up(seq):
            seq.num_cached_tokens = seq.num_computed
            # Otherwise its prefetch request was counted, or its start before a fetch that failed.
            if not (seq.request.continues or seq.was_prefetched):
                self._num_queries += seq.num_tokens
                self._num_hits += seq.num_computed
        return True

    def _take(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        """Gives the sequence the blocks with which it starts: those for all its tokens."""
        num_blocks = -(-seq.num_tokens // self.block_size)
        blocks = self.pool.try_allocate(num_blocks - len(found[0]), shared=found[0])
        if blocks is None:
            return False
        seq.tables, seq.room = [blocks], num_blocks * self.block_size
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives the sequence blocks for `num_tokens` tokens. Returns False, with nothing changed, if too few
        are free."""
        blocks = self.pool.try_allocate(-(-num_tokens // self.block_size) - len(seq.block_ids))
        if blocks is None:
            return False
        seq.tables[0] += blocks
        seq.room += len(blocks) * self.block_size
        return True

    def blocks_of(self, seq: Sequence) -> list[int]:
        """Returns all blocks of a sequence, in the order of its tokens."""
        return seq.block_ids

    def would_free(self, seq: Sequence) -> bool:
        """Returns whether `release` would free a block now, because the sequence alone holds it. Blocks that
        are lent or that a fetch fills stay held."""
        return any(self.pool.num_holders(block) == 1 for block in reversed(self.blocks_of(seq)))

    def computed(self, seq: Sequence) -> None:
        """Makes the sequence's full blocks findable, as far as its tokens are known and a step that computes
        them is planned. They may be found before they are written: they are read only later in that step, or
        in a later one."""
        num_known = min(seq.num_computed, len(seq.token_ids))
        if num_known < seq.register_at:
            return
        size = self.block_size
        num_full = num_known // size
        extend_keys(seq.keys, seq.root, seq.token_ids, size)
        self._make_findable(seq, seq.register_at // size - 1, num_full)
        seq.register_at = (num_full + 1) * size

    def copies(self, scheduled: abc.Sequence[SeqPart]) -> StateCopies | None:
        """Returns the copies of states that belong to a step. It is called at the end of each step's plan."""
        return None

    def prompt_ends(self, seq: Sequence) -> None:
        """Drops the sequence's promises of blocks: its prompt has been computed, or will not be."""
        for key in seq.promised:
            self._promised[key] -= 1
            if not self._promised[key]:
                del self._promised[key]
        seq.promised = []

    def release(self, seq: Sequence) -> None:
        """Takes the sequence's blocks back. Steps in flight may still write there, but the next owner writes
        later."""
        self.prompt_ends(seq)
        self._release(self.blocks_of(seq))
        seq.tables, seq.room, seq.fetch = [], 0, None

    # Blocks from lower tiers and other workers

    def fetch(self, seq: Sequence) -> bool:
        """Starts a fetch of the missing blocks of a sequence that has just started. Returns whether the
        sequence waits for it."""
        return self._looks_up(seq) and self.fetches.begin(seq)

    # Blocks that parts of the engine hold

    def hold(self, blocks: abc.Sequence[int]) -> None:
        """Holds blocks of a sequence, or findable blocks, until `unhold`."""
        self.pool.hold(blocks)
        self._held.update(blocks)

    def unhold(self, blocks: abc.Sequence[int]) -> None:
        self._held.subtract(blocks)
        self._release(blocks)

    def check_held(self, held: abc.Sequence[int]) -> None:
        """Checks that the parts hold these blocks, each as often as it is named, and no others."""
        assert Counter(held) == +self._held, "blocks that no part holds, or that a part wrongly counts on"

    # Everything else

    def reset(self, running: abc.Iterable[Sequence]) -> bool:
        """Forgets all cached blocks. Returns False if some are in use: running sequences continue, but no
        other sequence will find their KV."""
        for seq in running:
            self.prompt_ends(seq)
            seq.register_at = NEVER
        self.fetches.forget()
        return self.pool.reset()

    def fill_in(self, stats: Stats) -> None:
        """Adds the figures of the blocks to the scheduler's."""
        stats.num_blocks = self.pool.num_blocks
        stats.num_free_blocks = self.pool.num_free
        stats.prefix_cache_queries, stats.prefix_cache_hits = self._num_queries, self._num_hits
        stats.external_prefix_cache_queries = self.fetches.num_queries
        stats.external_prefix_cache_hits = self.fetches.num_hits

    def check(self, running: abc.Sequence[Sequence]) -> None:
        """Checks references, promises and fetches. `running`: all sequences that have blocks. Raises
        AssertionError."""
        held = [*self._held.elements()]
        for blocks in (*map(self.blocks_of, running), *self.fetches.held(), *self._held_more()):
            held += blocks
        self.pool.check(held)
        assert self._promised == Counter(key for seq in running for key in seq.promised), (
            "promises without a sequence"
        )
        self.fetches.check(running)
        for seq in running:
            self._check_tables(seq)
            assert not seq.promised or seq.register_at != NEVER, "a promise that is not kept"

    # Inside

    def _held_more(self) -> abc.Iterable[list[int]]:
        """Returns the blocks that have something else than a sequence's KV."""
        return ()

    def _looks_up(self, seq: Sequence) -> bool:
        """True if the sequence may use cached blocks. Prompt logprobs need every prompt token computed."""
        params = seq.request.params
        return (
            self.pool.enable_caching
            and params.prompt_logprobs is None
            and not params.skip_reading_prefix_cache
        )

    def _num_promises(self, seq: Sequence, index: int, end: int) -> int:
        """Returns how many sequences will make more of the sequence's first `end` blocks findable than the
        first `index`."""
        return self._promised.get(seq.keys[index], 0)

    def _extend_keys(self, seq: Sequence) -> None:
        """Makes the keys of the sequence's full blocks."""
        root, token_ids, keys = self._last_looked_up
        if not seq.keys and root == seq.root:  # comparing tokens is many times as fast as hashing them
            seq.keys = keys[: common_length(seq.token_ids, token_ids) // self.block_size]
        self._last_looked_up = seq.root, seq.token_ids, seq.keys
        extend_keys(seq.keys, seq.root, seq.token_ids, self.block_size)

    def _follows(self, tail: Tail, seq: Sequence, num_full: int) -> bool:
        """Returns whether a tail has the KV of the sequence's tokens after its first `num_full` blocks."""
        return tail.end // self.block_size == num_full and self._is_of(tail, seq)

    def _is_of(self, tail: Tail, seq: Sequence) -> bool:
        """Returns whether a tail has the KV of the sequence's tokens up to its end."""
        if self.pool.generation(tail.block) != tail.generation:
            return False
        return tail.keys == keys_with_tail(seq.keys, seq.root, seq.token_ids[: tail.end], self.block_size)

    def _make_findable(self, seq: Sequence, start: int, end: int) -> None:
        """Enters the sequence's full blocks from `start` to `end` into the prefix cache."""
        self._register(seq, seq.keys[start:end], start, seq.block_ids[start:end])

    def _register(
        self, seq: Sequence, keys: list[bytes], start: int, blocks: list[int], group: int = 0
    ) -> None:
        """Enters blocks of one table into the prefix cache. A block whose content is findable already, in
        another block, stays with the sequence as a private copy."""
        for block, key in zip(blocks, keys):
            self.pool.register(block, key)
        for watcher in self.watchers:
            watcher.registered(seq, start, blocks, group)

    def _check_tables(self, seq: Sequence) -> None:
        assert seq.room == len(seq.block_ids) * self.block_size, "room and blocks differ"
        if seq.status is not SequenceStatus.DECODE:
            assert seq.room - seq.num_tokens in range(self.block_size), "a prefill without all its blocks"

    def _release(self, blocks: abc.Sequence[int]) -> None:
        """Releases references on these blocks. The watchers are notified before another sequence can get the
        blocks."""
        for watcher in self.watchers:
            watcher.released(blocks)
        self.pool.release(blocks)
