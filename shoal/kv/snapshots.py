"""`Snapshots`: kept states of recurrent layers. A snapshot takes as many KV blocks as hold its bytes, and is
found by the key of the block at whose end it was taken.

KV blocks and snapshots share one memory, and the load divides it: both are evicted in the order of their last
use. A snapshot is of no use without the KV blocks before it, so it is evicted with the last of these. The
snapshots of running sequences are evicted last, if nothing else is left. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from shoal.kv.blocks import BlockPool


class StateSnapshot:
    """One kept state. `blocks` are in the order of the row's parts."""

    __slots__ = ("blocks", "is_used", "key", "num_pins", "num_users", "used_at")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.key = b""  # until it is registered
        self.is_used = False  # another sequence began with it, or the one that took it has ended
        self.num_pins = 0  # restores that are not planned yet, fetches, and copies to lower tiers
        self.num_users = 0  # running sequences that took it or began with it
        self.used_at = 0  # on the pool's clock, `num_freed`


class SnapshotListener(Protocol):
    """Is notified of snapshots that can't be found any longer. Must not call the snapshots."""

    def snapshot_removed(self, key: bytes) -> None:
        """The snapshot with this key was evicted or dropped."""
        ...


class Snapshots:
    """`size`: blocks of a snapshot. The pool counts the blocks of snapshots as held.

    `reserved`: the number of blocks for snapshots alone, numbered after the pool's; 0: snapshots take the
    pool's. An instance listens to the pool, and touches no memory."""

    def __init__(self, pool: BlockPool, size: int, reserved: int = 0) -> None:
        self.size = size
        self.is_shared = not reserved
        self._pool = pool
        self._source = pool if self.is_shared else BlockPool(reserved, enable_caching=False)
        self._offset = 0 if self.is_shared else pool.num_blocks
        self._found: dict[bytes, StateSnapshot] = {}
        # the findable ones without users, by last use, the oldest first
        self._idle: OrderedDict[StateSnapshot, None] = OrderedDict()
        # taken and not registered yet, or forgotten while pinned
        self._others: set[StateSnapshot] = set()
        self._spares: list[list[int]] = []  # blocks of dropped snapshots
        self._num_pinned = 0  # findable ones with a pin
        self.listeners: list[SnapshotListener] = []
        pool.listeners.append(self)

    # Look-up

    def find(self, key: bytes) -> StateSnapshot | None:
        return self._found.get(key)

    def longest(self, keys: list[bytes], end: int) -> int:
        """Returns the largest n up to `end` for which keys[n - 1] has a snapshot; 0 if none has."""
        found = self._found
        return next((i for i in range(end, 0, -1) if keys[i - 1] in found), 0) if found else 0

    @property
    def num_found(self) -> int:
        return len(self._found)

    @property
    def num_free_blocks(self) -> int:
        """The blocks that the pool would get back if all snapshots without a pin were evicted."""
        return self.size * self._num_evictable if self.is_shared else 0

    @property
    def num_free(self) -> int:
        """The number of snapshots that could be taken if everything without a holder were evicted."""
        return self._source.num_free // self.size + self._num_evictable

    # Taking and giving back

    def take(self) -> StateSnapshot | None:
        """Returns a new snapshot, to be registered or dropped. It evicts what was used longest ago, KV blocks
        or a snapshot. None: no block is free."""
        if self._spares:
            return self._new(self._spares.pop())
        if self.is_shared:
            self._evict_older()
        blocks = self._source.try_allocate(self.size)
        while blocks is None and self._evict_oldest():
            blocks = self._source.try_allocate(self.size)
        return None if blocks is None else self._new([self._offset + block for block in blocks])

    def make_room(self, num_blocks: int) -> None:
        """Gives blocks back to the pool, until it has this many free, and as long as a snapshot was used
        before the block that the pool would evict next."""
        if not self.is_shared:
            return
        while self._spares and self._pool.num_free < num_blocks:
            self._give_back(self._spares.pop())
        self._evict_older()
        while self._pool.num_free < num_blocks and (self._evict_oldest() or self._drop_new()):
            pass

    def register(self, snapshot: StateSnapshot, key: bytes) -> None:
        """Makes a new snapshot findable. There is no other with this key."""
        assert key not in self._found and snapshot in self._others
        self._others.remove(snapshot)
        self._num_pinned += snapshot.num_pins > 0
        snapshot.key, self._found[key] = key, snapshot
        self._idle[snapshot] = None
        snapshot.used_at = self._pool.num_freed

    def is_new(self, snapshot: StateSnapshot) -> bool:
        """Returns False if a new snapshot was registered, or has lost its blocks in `make_room`."""
        return snapshot in self._others

    def use(self, snapshot: StateSnapshot) -> None:
        """Makes a findable snapshot the one that was used last."""
        snapshot.is_used = True
        if snapshot in self._idle:
            self._idle.move_to_end(snapshot)
        snapshot.used_at = self._pool.num_freed

    def begin_use(self, snapshot: StateSnapshot) -> None:
        """Adds a running sequence as a user."""
        snapshot.num_users += 1
        self._idle.pop(snapshot, None)

    def end_use(self, snapshot: StateSnapshot) -> bool:
        """Ends a use. Returns whether the snapshot is still findable."""
        snapshot.num_users -= 1
        is_findable = self._found.get(snapshot.key) is snapshot
        if is_findable and not snapshot.num_users:
            self._idle[snapshot] = None
        return is_findable

    def pin(self, snapshot: StateSnapshot) -> None:
        """Keeps a snapshot from eviction until `unpin`."""
        snapshot.num_pins += 1
        self._num_pinned += snapshot.num_pins == 1 and snapshot not in self._others

    def unpin(self, snapshot: StateSnapshot) -> None:
        """Ends a pin. A snapshot that is not findable is dropped with its last pin."""
        snapshot.num_pins -= 1
        if snapshot.num_pins == 0:
            if snapshot in self._others:
                self.drop(snapshot)
            else:
                self._num_pinned -= 1

    def drop(self, snapshot: StateSnapshot) -> None:
        """Forgets a snapshot, findable or new."""
        if self._found.get(snapshot.key) is snapshot:
            self._forget(snapshot)
            self._num_pinned -= snapshot.num_pins > 0
        self._others.discard(snapshot)
        if snapshot.num_pins:
            self._others.add(snapshot)
        else:
            self._spares.append(snapshot.blocks)

    def forget_all(self) -> None:
        """Forgets the findable ones, and gives the pool its blocks back."""
        self.cleared()
        while self._spares:
            self._give_back(self._spares.pop())

    # The pool's listener

    def removed(self, key: bytes, block: int) -> None:
        snapshot = self._found.get(key)
        if snapshot is not None:
            self.drop(snapshot)

    def cleared(self) -> None:
        for snapshot in list(self._found.values()):
            self.drop(snapshot)

    # Checks

    def held(self) -> Iterator[list[int]]:
        """Returns the blocks of the pool that snapshots have."""
        if self.is_shared:
            yield from self._spares
            for snapshot in (*self._found.values(), *self._others):
                yield snapshot.blocks

    def check(self, pinned: list[StateSnapshot], new: list[StateSnapshot], used: list[StateSnapshot]) -> None:
        """`pinned`: the snapshot of each pin; `new`: those that were taken and not registered; `used`: the
        snapshot of each use by a running sequence. Raises AssertionError."""
        for key, snapshot in self._found.items():
            assert snapshot.key == key and self._pool.find(key) is not None, "a snapshot without its KV"
        everything = [*self._found.values(), *self._others]
        assert all(len(snapshot.blocks) == self.size for snapshot in everything), "a snapshot of another size"
        assert all(snapshot.num_pins == pinned.count(snapshot) for snapshot in everything), "pins miscounted"
        assert all(snapshot in everything for snapshot in pinned), "a restore from a snapshot that is gone"
        assert self._num_pinned == sum(snapshot.num_pins > 0 for snapshot in self._found.values())
        assert all(one.num_users == used.count(one) for one in self._found.values()), "uses miscounted"
        idle = {snapshot for snapshot in self._found.values() if not snapshot.num_users}
        assert idle == set(self._idle), "idle snapshots miscounted"
        forgotten = {snapshot for snapshot in pinned if self._found.get(snapshot.key) is not snapshot}
        assert self._others == forgotten | set(new), "snapshots without a sequence"
        assert len(new) == len(set(new)), "a snapshot that two sequences take"
        if not self.is_shared:
            blocks = [*self._spares, *(snapshot.blocks for snapshot in everything)]
            self._source.check([block - self._offset for own in blocks for block in own])

    # Inside

    @property
    def _num_evictable(self) -> int:
        return len(self._found) + len(self._spares) - self._num_pinned

    def _new(self, blocks: list[int]) -> StateSnapshot:
        snapshot = StateSnapshot(blocks)
        self._others.add(snapshot)
        return snapshot

    def _forget(self, snapshot: StateSnapshot) -> None:
        del self._found[snapshot.key]
        self._idle.pop(snapshot, None)
        for listener in self.listeners:
            listener.snapshot_removed(snapshot.key)

    def _give_back(self, blocks: list[int]) -> None:
        self._source.release([block - self._offset for block in blocks])

    def _oldest(self) -> StateSnapshot | None:
        return next((snapshot for snapshot in self._idle if not snapshot.num_pins), None)

    def _evict_oldest(self) -> bool:
        """Evicts the snapshot that was used longest ago; if all are in use by running sequences, one of
        these. Returns False if every snapshot has a pin."""
        oldest = self._oldest() or next((one for one in self._found.values() if not one.num_pins), None)
        if oldest is None:
            return False
        self._forget(oldest)
        self._give_back(oldest.blocks)
        return True

    def _drop_new(self) -> bool:
        """Gives the pool the blocks of a snapshot that is not registered yet; False: there is none."""
        new = next((snapshot for snapshot in self._others if not snapshot.num_pins), None)
        if new is None:
            return False
        self._others.remove(new)
        self._give_back(new.blocks)
        return True

    def _evict_older(self) -> None:
        """Evicts the snapshots that were used before the block that the pool would evict next."""
        while (oldest := self._oldest()) is not None:
            age = self._pool.next_age()
            if age is None or age <= oldest.used_at:
                return
            self._evict_oldest()
