"""`GroupedBlocks`: `SequenceBlocks` of a model with several groups of layers, or with windows in all layers.
kv/groups.py makes the groups, kv/places.py says which blocks a position needs.

A sequence has a table for each group (kv/groups.py). A group that sees everything has blocks for all tokens.
A group with a window has them from the first position that the next token sees to the end of the next chunk,
and gives back what lies before when a later step of the sequence is planned: the step that last read those
blocks is launched then, and their next owner writes later. They stay findable until they are overwritten."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, abc
from itertools import accumulate

from shoal.engine.scheduling.grouped_fetches import GroupedFetches
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.hashing import group_key
from shoal.kv.groups import NO_BLOCK, LayerGroup, fitting_chunk
from shoal.kv.places import match, measure
from shoal.stats import KvGroupStats, Stats


class GroupedBlocks(SequenceBlocks):
    """chunk: the most tokens of one sequence that a step could compute. `self.chunk`, which it may compute,
    is less if that gives a small cache room for longer sequences."""

    fetches_class: type[GroupedFetches] = GroupedFetches

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        chunk: int,
        max_model_len: int,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.groups = tuple(groups)
        self.largest = max(group.block_size for group in groups)
        self.chunk, self.room = fitting_chunk(groups, num_blocks, chunk, max_model_len)
        self._group_of = [0] * num_blocks  # the group that each held block belongs to
        self._prefilling: list[Sequence] = []  # sequences that promise blocks
        self.fetches = self.fetches_class(
            self.pool,
            block_size,
            self.groups,
            self._register,
            self._release,
            self.blocks_of,
            self._take_again,
        )

    def find(self, seq: Sequence) -> tuple[list[list[int]], int]:
        if not self._looks_up(seq):
            return [[] for _ in self.groups], 0
        self._extend_keys(seq)
        tail = seq.tail
        if tail is not None and tail.end < seq.num_tokens and self._is_of(tail, seq):
            return [list(table) for table in tail.tables], tail.end
        keys = seq.keys[: (seq.num_tokens - 1) // self.block_size]
        return match(self.pool, self.groups, keys, self.block_size)

    def lacks_room(self, seq: Sequence) -> bool:
        num_free = self._num_free
        if sum(group.most_blocks(seq.num_tokens, self.chunk) for group in self.groups) <= num_free:
            return False
        num_cached, num_held = self._measure(seq)
        num_taken = sum(self._needed(seq, num_cached, num_cached)) - num_held
        # Tokens before the windows take no blocks.
        num_taken -= sum(group.first_block(num_cached) for group in self.groups)
        return num_taken > num_free and not self.is_coming(seq, num_cached // self.block_size)

    def start(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        has_started = super().start(seq, found, num_cached)
        if seq.promised:
            self._prefilling.append(seq)
        return has_started

    def prompt_ends(self, seq: Sequence) -> None:
        if seq.promised:
            self._prefilling.remove(seq)
        super().prompt_ends(seq)

    def _take(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        lacking, shared = self._lacking(seq, found, num_cached, num_cached), _blocks_in(found)
        blocks = self._allocate(sum(lacking), shared)
        if blocks is None:
            return False
        seq.tables = found
        self._add(seq, lacking, blocks[len(shared) :])
        return True

    def _take_again(self, seq: Sequence, found: list[list[int]], num_cached: int) -> bool:
        """Exchanges the blocks of a sequence that has just started, or whose fetch has just ended, for those
        with which it would start with `num_cached` tokens. Returns False if there is no room for them; the
        sequence then has as many blocks as before."""
        computed = seq.num_computed
        before = [table[: group.num_blocks(computed)] for group, table in zip(self.groups, seq.tables)]
        self._release(self.blocks_of(seq))
        is_taken = self._take(seq, found, num_cached)
        if not is_taken:
            taken_back = self._take(seq, before, computed)
            assert taken_back, "a sequence's own blocks are gone"
        return is_taken

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives back what lies before the windows, and then gives the sequence blocks for `num_tokens`
        tokens. Returns False if too few are free."""
        # The host may know of fewer tokens than are planned, and a step in flight may sample fewer.
        position = min(seq.num_computed, len(seq.token_ids) - 1)
        for group, table in zip(self.groups, seq.tables):
            end = start = min(group.first_block(position), len(table))
            while start and table[start - 1] != NO_BLOCK:
                start -= 1
            self._release(table[start:end])
            table[start:end] = [NO_BLOCK] * (end - start)
        lacking = self._lacking(seq, seq.tables, seq.num_computed, num_tokens)
        blocks = self._allocate(sum(lacking))
        if blocks is None:
            return False
        self._add(seq, lacking, blocks)
        return True

    def blocks_of(self, seq: Sequence) -> list[int]:
        own = [
            (i * group.block_size, block)
            for group, table in zip(self.groups, seq.tables)
            for i, block in enumerate(table)
            if block != NO_BLOCK
        ]
        return [block for _, block in sorted(own)]

    def group_of(self, block: int) -> int:
        """Returns the group that a block belongs to, or belonged to when it was last held."""
        return self._group_of[block]

    @property
    def _num_free(self) -> int:
        """The number of blocks that `_allocate` could return."""
        return self.pool.num_free

    def _allocate(self, num_blocks: int, shared: abc.Sequence[int] = ()) -> list[int] | None:
        return self.pool.try_allocate(num_blocks, shared)

    def _measure(self, seq: Sequence) -> tuple[int, int]:
        """Returns the number of tokens that `find` would find, and how many of their blocks are held."""
        if seq.tail is not None or not self._looks_up(seq):
            found, num_cached = self.find(seq)
            return num_cached, sum(self.pool.is_held(block) for block in _blocks_in(found))
        self._extend_keys(seq)
        keys = seq.keys[: (seq.num_tokens - 1) // self.block_size]
        return measure(self.pool, self.groups, keys, self.block_size)

    def _lacking(
        self, seq: Sequence, tables: abc.Sequence[list[int]], num_computed: int, num_tokens: int
    ) -> list[int]:
        """Returns how many blocks each table lacks."""
        needed = self._needed(seq, num_computed, num_tokens)
        return [max(0, num - len(table)) for num, table in zip(needed, tables)]

    def _needed(self, seq: Sequence, num_computed: int, num_tokens: int) -> list[int]:
        """Returns how long each table must be for `num_tokens` tokens and for what is left of a prompt. A
        table of a group with a window has the blocks of one chunk, so that a prompt needs no more blocks at
        once later than with its first chunk."""
        whole = max(num_tokens, seq.num_tokens if seq.status is not SequenceStatus.DECODE else 0)
        reach = max(num_tokens, min(whole, num_computed + self.chunk))
        return [group.num_blocks(whole if group.window is None else reach) for group in self.groups]

    def _num_promises(self, seq: Sequence, index: int, end: int) -> int:
        # A prefix is found as a whole, and the blocks of windows in its middle may be gone already. So what
        # counts is whether the last block that a sequence shares, of all groups, is still to be computed.
        step = self.largest // self.block_size
        num_promises = 0
        for other in self._prefilling:
            theirs, own = other.keys, seq.keys
            most = min(len(theirs), end)
            num_shared = bisect_left(range(most), True, key=lambda i: theirs[i] != own[i]) // step * step
            num_promises += num_shared > max(index, other.register_at // self.block_size - 1)
        return num_promises

    def _add(self, seq: Sequence, lacking: list[int], blocks: list[int]) -> None:
        """Divides new blocks among the tables."""
        ends = accumulate(lacking)
        for g, (table, num, end) in enumerate(zip(seq.tables, lacking, ends)):
            own = blocks[end - num : end]
            table += own
            for block in own:
                self._group_of[block] = g
        seq.room = min(len(table) * group.block_size for group, table in zip(self.groups, seq.tables))

    def fill_in(self, stats: Stats) -> None:
        super().fill_in(stats)
        used = Counter(g for block, g in enumerate(self._group_of) if self.pool.is_held(block))
        stats.kv_groups = [
            KvGroupStats(len(group.layers), group.window, group.block_size, used[g])
            for g, group in enumerate(self.groups)
        ]

    def _make_findable(self, seq: Sequence, start: int, end: int) -> None:
        for g, group in enumerate(self.groups):
            step = group.block_size // self.block_size
            first, own_end = start // step, end // step
            keys = [group_key(seq.keys[(i + 1) * step - 1], g) for i in range(first, own_end)]
            self._register(seq, keys, first, seq.tables[g][first:own_end], g)

    def _check_tables(self, seq: Sequence) -> None:
        position = min(seq.num_computed, len(seq.token_ids) - 1)
        for group, table in zip(self.groups, seq.tables):
            assert len(table) * group.block_size >= seq.room, "a table that is too short"
            assert NO_BLOCK not in table[group.first_block(position) :], "a position without its block"


def _blocks_in(tables: abc.Sequence[list[int]]) -> list[int]:
    return [block for table in tables for block in table if block != NO_BLOCK]
