"""The block pool: who holds which KV block, which blocks can be found by content, and which one is used next.

Blocks are ints; the tensors are elsewhere. A block is held by `ref_count` sequences, or it is free. A free
block keeps its key and stays findable until it is taken for something else. The order of re-use: first blocks
without a key, the last freed first (its memory is warm), then blocks with a key, the lowest priority first,
of equal ones the least recently freed.

Several blocks may have equal content; one of them is findable. It is the first one as long as it is held,
then one that is still held. Copies without a reference are free and have no key. So the holder of a block can
find the content of all blocks before it. Sequences are freed tail first, so no findable block outlives its
parent, unless priorities or `reset` ask for that: what can be found can be reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Protocol

PRIORITIES = range(-128, 128)  # a findable block's; 0 unless set


class BlockListener(Protocol):
    """Is notified of content that can't be found any longer. Must not call the pool."""

    def removed(self, key: bytes, block: int) -> None:
        """The block, which has had this content, was taken for something else, or it was reset."""
        ...

    def cleared(self) -> None:
        """Every key was forgotten."""
        ...


class BlockPool:
    """Pure bookkeeping, O(1) a block. With `enable_caching` False no block is ever findable.

    For one thread: what a call does is done when it returns. Steps in flight may still read a block that was
    released; its next owner writes it in a later step. A copy that is not ordered with the steps must
    hold a reference until it has ended.
    """

    def __init__(
        self, num_blocks: int, enable_caching: bool = True, listener: BlockListener | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free = num_blocks  # evictable ones included
        self.listeners: list[BlockListener] = [] if listener is None else [listener]
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks  # None: not findable
        self._key_to_block: dict[bytes, int] = {}
        # For each key: held blocks with this content that are not the findable one
        self._copies: dict[bytes, list[int]] = {}
        self._copy_to_key: dict[int, bytes] = {}
        # Free blocks lie in rings: doubly linked, so that a hit can leave the middle. One for those without
        # key, one for each priority in use; an index of its own stands for the end of each.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._rings: dict[int, int] = {}  # priority -> end
        self._ends = [num_blocks]  # in the order of re-use; the first ring's blocks have no key
        # For each block: the end of the ring in which it lies, or will lie when it is free
        self._end_of = [num_blocks] * num_blocks
        self._default_end = self._ring(0)
        self._freed_at = [0] * num_blocks  # age, of blocks with a key
        self._generations = [0] * num_blocks
        self.num_taken = 0  # free blocks that were taken so far, found ones included
        self.num_freed = 0  # how often a block with a key was released: the clock of their ages

    # Look-up

    def find(self, key: bytes) -> int | None:
        """The findable block with this content. Takes no reference."""
        return self._key_to_block.get(key)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest findable prefix of `keys`. Takes no reference: only try_allocate makes
        them safe from re-use."""
        found = []
        for key in keys:
            block = self._key_to_block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def key_of(self, block: int) -> bytes | None:
        """The key by which the block can be found."""
        return self._keys[block]

    def has_copies(self, key: bytes) -> bool:
        """Says if held blocks besides the findable one have this content. One of them inherits the key when
        the findable block is released, and no listener is notified."""
        return key in self._copies

    def generation(self, block: int) -> int:
        """A number that grows whenever the block is taken for something else, or its content is forgotten by
        `reset`. Who reads a block without holding it looks before and after. Any thread may ask."""
        return self._generations[block]

    def is_held(self, block: int) -> bool:
        return self._ref_counts[block] > 0

    def num_holders(self, block: int) -> int:
        return self._ref_counts[block]

    def cached_keys(self) -> list[bytes]:
        """The keys of all findable blocks."""
        return list(self._key_to_block)

    def free_blocks(self) -> list[int]:
        """All free blocks, in the order of re-use."""
        return [block for end in self._ends for block in self._ring_from(end)]

    def coldest(self, num_blocks: int) -> list[int]:
        """Returns up to `num_blocks` free blocks with a key, in the order in which they will be taken."""
        blocks = (block for end in self._ends[1:] for block in self._ring_from(end))
        return list(islice(blocks, num_blocks))

    def next_age(self) -> int | None:
        """Returns when the block that will be taken next was released, on the clock of `num_freed`. None: it
        has no key, or no block is free."""
        block = next((self._next[end] for end in self._ends if self._next[end] != end), None)
        return None if block is None or self._keys[block] is None else self._freed_at[block]

    # Taking and giving back

    def try_allocate(self, num_blocks: int, shared: Sequence[int] = ()) -> list[int] | None:
        """The `shared` blocks, then `num_blocks` others, with a reference on each. None, and nothing taken,
        if too few are free."""
        ref_counts = self._ref_counts
        num_taken = num_blocks + sum(ref_counts[block] == 0 for block in shared)
        if num_taken > self.num_free:
            return None
        self.num_taken += num_taken
        for block in shared:
            if ref_counts[block] == 0:
                self._unlink(block)
            ref_counts[block] += 1
        taken = list(shared)
        for end in self._ends:
            while num_blocks and (block := self._next[end]) != end:
                self._unlink(block)
                self._forget(block)
                ref_counts[block] = 1
                self._generations[block] += 1
                taken.append(block)
                num_blocks -= 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Takes one more reference on each, free ones included."""
        self.try_allocate(0, shared=blocks)

    def release(self, blocks: Sequence[int], coldest: bool = False) -> None:
        """Gives back a reference on each. The blocks are in the order of a sequence, and are freed tail
        first: a shared prefix outlives its suffixes. With `coldest` they are re-used before all others, the
        first of them first: for blocks from `coldest` whose reference did not use their content."""
        ref_counts = self._ref_counts
        for block in reversed(blocks):
            assert ref_counts[block] > 0
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                if self._copies:
                    self._hand_over(block)
                end = self._end_of[block]
                if end == self.num_blocks:
                    self._link(block, before=self._next[end])
                elif coldest and (first := self._next[end]) != end:
                    self._freed_at[block] = self._freed_at[first] - 1
                    self._link(block, before=first)
                else:
                    self.num_freed += 1
                    self._freed_at[block] = self.num_freed
                    self._link(block, before=end)

    # Contents

    def register(self, block: int, key: bytes) -> int:
        """Makes a held block findable. Returns the findable block of this content: another one, if it had the
        key already and is held."""
        assert self._ref_counts[block] > 0 and self._keys[block] is None and block not in self._copy_to_key
        if not self.enable_caching:
            return block
        first = self._key_to_block.setdefault(key, block)
        if first == block:
            self._keys[block] = key
            self._end_of[block] = self._default_end
            return block
        self._copies.setdefault(key, []).append(block)
        self._copy_to_key[block] = key
        if self._ref_counts[first]:
            return first
        self._unlink(first)
        self._hand_over(first)
        self._link(first, before=self._next[self.num_blocks])
        return block

    def set_priority(self, which: Iterable[bytes | int], priority: int) -> None:
        """Sets the priority of findable blocks, named by key or as blocks; others are passed over. It holds
        until the content is forgotten. Ages stay, so this is O(free blocks). Raises ValueError for a priority
        not in PRIORITIES."""
        end = self._ring(priority)
        moved = []
        for item in which:
            block = self._key_to_block.get(item) if isinstance(item, bytes) else item
            if block is None or self._keys[block] is None or self._end_of[block] == end:
                continue
            self._end_of[block] = end
            if self._ref_counts[block] == 0:
                self._unlink(block)
                moved.append(block)
        at, age = end, self._freed_at
        for block in sorted(moved, key=age.__getitem__, reverse=True):
            while self._prev[at] != end and age[self._prev[at]] > age[block]:
                at = self._prev[at]
            self._link(block, before=at)
            at = block

    def reset(self, keys: Iterable[bytes] | None = None) -> bool:
        """Forgets these keys, or all of them, held blocks included. Returns False if one of their blocks (or
        any block) was held."""
        if keys is None:
            self._forget_all()
            return self.num_free == self.num_blocks
        idle = True
        for key in keys:
            block = self._key_to_block.get(key)
            if block is None:
                continue
            copies = self._copies.pop(key, [])
            for copy in copies:
                del self._copy_to_key[copy]
            for stale in (block, *copies):
                self._generations[stale] += 1
            if self._ref_counts[block] == 0:
                self._unlink(block)
                self._forget(block)
                self._link(block, before=self._next[self.num_blocks])
            else:
                self._forget(block)
                idle = False
        return idle

    def check(self, held: Iterable[int]) -> None:
        """Checks all counts and rings. `held` names every reference that exists: a block once for each of its
        holders."""
        holders = Counter(held)
        assert self._ref_counts == [holders[block] for block in range(self.num_blocks)], (
            "references differ from the holders'"
        )
        free = self.free_blocks()
        assert len(free) == len(set(free)) == self.num_free, "the free list and its count differ"
        assert self.num_free + len(holders) == self.num_blocks, "free + used != total"
        assert not holders.keys() & set(free), "a held block is in the free list"
        for end in self._ends:
            ring = list(self._ring_from(end))
            assert all(self._prev[self._next[block]] == block for block in [*ring, end]), (
                "the free list is torn"
            )
            assert all(self._end_of[block] == end for block in ring), "a block in another's ring"
            assert end == self.num_blocks or all(
                self._freed_at[a] <= self._freed_at[b] for a, b in pairwise(ring)
            ), "a ring out of age"
        assert self._key_to_block == {
            key: block for block, key in enumerate(self._keys) if key is not None
        }, "keys and index differ"
        assert all(
            (key is None) == (self._end_of[block] == self.num_blocks) for block, key in enumerate(self._keys)
        ), "ring and key differ"
        assert self._copy_to_key == {
            block: key for key, copies in self._copies.items() for block in copies
        }, "copies miscounted"
        for block, key in self._copy_to_key.items():
            assert holders[block] and holders[self._key_to_block[key]] and self._keys[block] is None, (
                "a copy without a findable block"
            )

    # Inside

    def _ring(self, priority: int) -> int:
        """The end of its ring, which may be new."""
        end = self._rings.get(priority)
        if end is None:
            if priority not in PRIORITIES:
                raise ValueError(
                    f"priority {priority!r} is not an integer from {PRIORITIES[0]} to {PRIORITIES[-1]}; 0 "
                    "is the default"
                )
            end = len(self._next)
            self._next.append(end)
            self._prev.append(end)
            self._rings[priority] = end
            self._ends[1:] = [self._rings[p] for p in sorted(self._rings)]
        return end

    def _ring_from(self, end: int) -> Iterator[int]:
        block = self._next[end]
        while block != end:
            yield block
            block = self._next[block]

    def _hand_over(self, block: int) -> None:
        """For a block that is held no longer. If it is findable, its key goes to a copy that is held; if it
        is a copy itself, it ends being one."""
        key = self._keys[block]
        if key is None:
            key = self._copy_to_key.pop(block, None)
            if key is None:
                return
            copies = self._copies[key]
            copies.remove(block)
        else:
            copies = self._copies.get(key, [])
            if not copies:
                return
            heir = copies.pop(0)
            del self._copy_to_key[heir]
            self._key_to_block[key] = heir
            self._keys[heir], self._keys[block] = key, None
            self._end_of[heir], self._end_of[block] = self._end_of[block], self.num_blocks
        if not copies:
            del self._copies[key]

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            self._end_of[block] = self.num_blocks
            del self._key_to_block[key]
            for listener in self.listeners:
                listener.removed(key, block)

    def _forget_all(self) -> None:
        """The order of re-use stays."""
        order = self.free_blocks()
        for end in self._ends:
            self._next[end] = self._prev[end] = end
        self.num_free = 0
        self._key_to_block.clear()
        self._copies.clear()
        self._copy_to_key.clear()
        self._keys = [None] * self.num_blocks
        self._end_of = [self.num_blocks] * self.num_blocks
        self._generations = [generation + 1 for generation in self._generations]
        for block in order:
            self._link(block, before=self.num_blocks)
        for listener in self.listeners:
            listener.cleared()

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block: int, before: int) -> None:
        previous = self._prev[before]
        self._next[previous] = self._prev[before] = block
        self._prev[block], self._next[block] = previous, before
        self.num_free += 1
