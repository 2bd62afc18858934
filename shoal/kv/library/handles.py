"""References on blocks as objects, for users of the library: given back when they are closed, left or
dropped. The engine's own are in its sequences."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from shoal.kv.blocks import BlockPool


class HeldBlocks:
    """Blocks in sequence order, a reference held on each until `close`, the end of a `with`, or until nobody
    has this object."""

    def __init__(
        self, manager: BlockManager, blocks: list[int], num_in_flight: int = 0, num_matched: int = 0
    ) -> None:
        self.blocks = blocks
        self.num_in_flight = num_in_flight  # of them, the first ones: others held them too,
        self.num_matched = num_matched  # and behind those: were found free
        self._manager = manager
        self._finalizer = weakref.finalize(self, manager.dropped.append, blocks)
        self._finalizer.atexit = False

    def share(self) -> HeldBlocks:
        """The same blocks, with references of their own."""
        return HeldBlocks(self._manager, self._manager.pool.try_allocate(0, shared=self.blocks) or [])

    def register(self, keys: Sequence[bytes]) -> None:
        """Makes the first len(keys) blocks findable, those that are not yet. One whose content others hold
        already is given back, and the one that was first takes its place."""
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
        """Twice does no harm."""
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
    """Hands out a pool's blocks. For one thread, but for dropping what was handed out: Python may collect an
    object in any thread and in the middle of anything, so dropped blocks wait in a queue for the next call,
    which sees them back in the order of their drops."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.dropped: deque[list[int]] = deque()

    def fence(self) -> None:
        """When it returns, whatever was dropped before is back in the pool."""
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
        """Holds `num_blocks` blocks for a prompt with these keys, found ones and new ones. Raises what
        BlockPool.prepare_prefill does."""
        self.fence()
        prefill = self.pool.prepare_prefill(keys, num_blocks)
        return HeldBlocks(self, prefill.blocks, len(prefill.in_flight), len(prefill.matched))
