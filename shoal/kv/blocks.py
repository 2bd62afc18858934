"""The block pool: who holds which KV block, which blocks can be found by content, and which one is used next.

Blocks are ints; the tensors are elsewhere. A block is held by `ref_count` sequences, or it lies in the free list. A free block keeps its
key and stays findable until it is taken for something else. The free list is the order of re-use: first blocks without a key, the last
freed first (its memory is warm), then blocks with a key, the least recently freed first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Pure bookkeeping, O(1) a block. With `enable_caching` False no block is ever findable."""

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free = num_blocks                                  # evictable ones included
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks        # of findable blocks
        self._key_to_block: dict[bytes, int] = {}
        # The free list is a ring through `num_blocks`, which stands for its end: doubly linked, so that a hit can leave its middle.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest findable prefix of `keys`. Takes no reference: only try_allocate makes them safe from re-use."""
        found = []
        for key in keys:
            block = self._key_to_block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def try_allocate(self, num_blocks: int, shared: Sequence[int] = ()) -> list[int] | None:
        """The `shared` blocks, then `num_blocks` others, with a reference on each. None, and nothing taken, if too few are free."""
        ref_counts = self._ref_counts
        if num_blocks + sum(ref_counts[block] == 0 for block in shared) > self.num_free:
            return None
        for block in shared:
            if ref_counts[block] == 0:
                self._unlink(block)
            ref_counts[block] += 1
        taken = list(shared)
        for _ in range(num_blocks):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._forget(block)
            ref_counts[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: bytes) -> None:
        """Makes a held block findable. Where another block has this key already, that one stays the findable one."""
        assert self._ref_counts[block] > 0 and self._keys[block] is None
        if self.enable_caching and key not in self._key_to_block:
            self._keys[block] = key
            self._key_to_block[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back a reference on each. They come in sequence order and are freed tail first: a shared prefix outlives its suffixes."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                end = self.num_blocks
                self._link(block, before=self._next[end] if self._keys[block] is None else end)

    def reset(self) -> bool:
        """Forgets every key, those of held blocks too. Returns whether no block was held."""
        self._key_to_block.clear()
        self._keys = [None] * self.num_blocks
        return self.num_free == self.num_blocks

    def free_blocks(self) -> list[int]:
        """In the order of re-use."""
        order, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def check(self, held: Iterable[int]) -> None:
        """Proves the books. `held` names every reference that exists: a block once for each of its holders."""
        holders = Counter(held)
        assert self._ref_counts == [holders[block] for block in range(self.num_blocks)], "references differ from the holders'"
        free = self.free_blocks()
        assert len(free) == len(set(free)) == self.num_free, "the free list and its count differ"
        assert self.num_free + len(holders) == self.num_blocks, "free + used != total"
        assert not holders.keys() & set(free), "a held block is in the free list"
        assert all(self._prev[self._next[block]] == block for block in [*free, self.num_blocks]), "the free list is torn"
        assert self._key_to_block == {key: block for block, key in enumerate(self._keys) if key is not None}, "keys and index differ"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._key_to_block[key]

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
