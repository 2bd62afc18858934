"""References on blocks as objects for other programs: they return when they are closed, left or dropped. The
engine counts its references in its sequences."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import NoFreeBlocksError
from shoal.kv.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class Prefill:
    """Blocks for a prompt, each with one reference."""

    in_flight: list[int]  # found, and held by others too
    matched: list[int]  # found free after them
    remaining: list[int]  # new

    @property
    def blocks(self) -> list[int]:
        """All of them in sequence order, as `release` takes them."""
        return self.in_flight + self.matched + self.remaining


def prepare_prefill(pool: BlockPool, keys: Sequence[bytes], num_blocks: int) -> Prefill:
    """Holds `num_blocks` blocks for a prompt: the findable prefix of `keys` (one for each full block),
    and new blocks for the rest and its tail. One transaction: raises NoFreeBlocksError, and nothing is
    taken, if too few are free. Raises ValueError for less than 0 blocks."""
    if num_blocks < 0:
        raise ValueError(f"{num_blocks} blocks can't be held; ask for 0 or more")
    hits = pool.match(keys[:num_blocks])
    num_in_flight = next((i for i, block in enumerate(hits) if not pool.is_held(block)), len(hits))
    num_free = pool.num_free - sum(not pool.is_held(block) for block in hits)
    blocks = pool.try_allocate(num_blocks - len(hits), shared=hits)
    if blocks is None:
        raise NoFreeBlocksError(
            f"{num_blocks - len(hits)} KV blocks are needed and {num_free} of {pool.num_blocks} are free; "
            "ask for fewer, or again when others have released some"
        )
    return Prefill(blocks[:num_in_flight], blocks[num_in_flight : len(hits)], blocks[len(hits) :])


class HeldBlocks:
    """Blocks in sequence order, with a reference on each until `close`, the end of a `with`, or the end of
    this object."""

    def __init__(
        self, manager: BlockManager, blocks: list[int], num_in_flight: int = 0, num_matched: int = 0
    ) -> None:
        self.blocks = blocks
        self.num_in_flight = num_in_flight  # the first blocks, which others held too
        self.num_matched = num_matched  # the next ones, which were found free
        self._manager = manager
        self._finalizer = weakref.finalize(self, manager.dropped.append, blocks)
        self._finalizer.atexit = False

    def share(self) -> HeldBlocks:
        """The same blocks, with references of their own."""
        return HeldBlocks(self._manager, self._manager.pool.try_allocate(0, shared=self.blocks) or [])

    def register(self, keys: Sequence[bytes]) -> None:
        """Makes the first len(keys) blocks findable. A block whose content others hold already is released,
        and the findable one takes its place."""
        pool = self._manager.pool
        for i, key in enumerate(keys):
            block = self.blocks[i]
            if pool.key_of(block) == key:
                continue
            first = pool.register(block, key)
            if first != block:
                pool.hold([first])
                self.blocks[i] = first
                pool.release([block])

    def close(self) -> None:
        """Releases the blocks. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._manager.fence()
            self._manager.pool.release(self.blocks)
            self.blocks = []

    def __len__(self) -> int:
        return len(self.blocks)

    def __enter__(self) -> HeldBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockManager:
    """Hands out a pool's blocks. All calls belong to one thread. HeldBlocks may be dropped in any thread,
    because Python collects objects at any moment: their blocks wait in a queue until the next call releases
    them, in the order of their drops."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.dropped: deque[list[int]] = deque()

    def fence(self) -> None:
        """Releases everything that was dropped before this call."""
        while self.dropped:
            self.pool.release(self.dropped.popleft())

    @property
    def num_free(self) -> int:
        self.fence()
        return self.pool.num_free

    def take(self, num_blocks: int) -> HeldBlocks:
        """Raises NoFreeBlocksError, with nothing taken, if too few are free."""
        return self.prepare_prefill((), num_blocks)

    def match(self, keys: Sequence[bytes]) -> HeldBlocks:
        """Holds the blocks of the longest findable prefix of `keys`."""
        self.fence()
        return self.prepare_prefill(keys, len(self.pool.match(keys)))

    def prepare_prefill(self, keys: Sequence[bytes], num_blocks: int) -> HeldBlocks:
        """Holds `num_blocks` blocks for a prompt with these keys, found ones and new ones. Raises
        NoFreeBlocksError and ValueError."""
        self.fence()
        prefill = prepare_prefill(self.pool, keys, num_blocks)
        return HeldBlocks(self, prefill.blocks, len(prefill.in_flight), len(prefill.matched))
