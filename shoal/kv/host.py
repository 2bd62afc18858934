"""The host tier's books: which slot of the pinned slab holds which block, which slots are in use, which one
goes next.

A slot is a block of a BlockPool of its own. Who copies into or out of a slot, or writes it to a file, holds
it meanwhile: a held slot is never given away. The slab itself and the copies are elsewhere. For one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.kv.block_file import BlockMeta, Event
from shoal.kv.blocks import BlockPool
from shoal.kv.policy import MAX_USES, check_policy


class HostTier:
    """Of blocks that nobody holds, the least recently used go first ("lru"), or the least frequently used
    ("lfu": uses while they are here, up to MAX_USES, halved after 10 uses a slot). With `record_events`
    somebody must call take_events. Raises ConfigError for another policy."""

    def __init__(self, num_slots: int, policy: str = "lru", record_events: bool = False) -> None:
        check_policy(policy)
        self.num_slots = num_slots
        self._pool = BlockPool(num_slots, listener=self)
        self._metas: dict[bytes, BlockMeta] = {}
        self._uses: dict[bytes, int] | None = {} if policy == "lfu" else None
        self._since_halving = 0
        self._events: list[Event] | None = [] if record_events else None

    @property
    def num_free(self) -> int:
        """Slots that take() could give, those with a block in them included."""
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """That can be found."""
        return len(self._metas)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the longest findable prefix of `keys`. Only hold() makes them safe."""
        return self._pool.match(keys)

    def find(self, key: bytes) -> int | None:
        return self._pool.find(key)

    def meta(self, key: bytes) -> BlockMeta | None:
        return self._metas.get(key)

    def take(self, num_slots: int) -> list[int] | None:
        """Slots to write into, held; the coldest blocks make room. None, and nothing taken, if too many slots
        are held."""
        return self._pool.try_allocate(num_slots)

    def put(self, slot: int, meta: BlockMeta) -> int:
        """A held slot, all of its bytes there, becomes findable, once. Where another held slot has this block
        already, that one stays the findable one. Returns it."""
        found = self._pool.register(slot, meta.key)
        if meta.key not in self._metas:
            self._metas[meta.key] = meta
            if self._events is not None:
                self._events.append(meta)
        self._used([meta.key])
        return found

    def hold(self, slots: Sequence[int], use: bool = True) -> None:
        """One more reference on each; unless `use` is False, a use of its block."""
        taken = self._pool.try_allocate(0, shared=slots)
        assert taken is not None
        if use:
            self._used([key for slot in slots if (key := self._pool.key_of(slot)) is not None])

    def release(self, slots: Sequence[int], coldest: bool = False) -> None:
        """Gives back a reference on each. In the order of a sequence: the tail goes before the head.
        `coldest`: in the order of `coldest`, to where they were."""
        self._pool.release(slots, coldest)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """These blocks (all, without `keys`) can't be found any more; held slots stay held."""
        self._pool.reset(keys)

    def coldest(self, num_blocks: int) -> list[tuple[int, BlockMeta]]:
        """Up to so many slots that nobody holds with their blocks, in the order in which they will be
        taken."""
        return [
            (slot, self._metas[key])
            for slot in self._pool.coldest(num_blocks)
            if (key := self._pool.key_of(slot)) is not None
        ]

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def check(self, held: Iterable[int]) -> None:
        """Proves the books. `held` names every reference that exists: a slot once for each of its holders."""
        self._pool.check(held)
        assert self._metas.keys() == set(self._pool.cached_keys()), (
            "metadata of other blocks than the findable ones"
        )
        assert all(meta.key == key for key, meta in self._metas.items())
        assert self._uses is None or self._uses.keys() == self._metas.keys(), (
            "uses of other blocks than the findable ones"
        )

    # As the pool's listener

    def removed(self, key: bytes, block: int) -> None:
        self._gone(key)

    def cleared(self) -> None:
        for key in list(self._metas):
            self._gone(key)

    def _gone(self, key: bytes) -> None:
        del self._metas[key]
        if self._uses is not None:
            del self._uses[key]
        if self._events is not None:
            self._events.append(key)

    def _used(self, keys: Sequence[bytes]) -> None:
        """Their slots are held."""
        if self._uses is None:
            return
        for key in keys:
            self._uses[key] = uses = min(self._uses.get(key, 0) + 1, MAX_USES)
            self._pool.set_priority([key], uses)
        self._since_halving += len(keys)
        if self._since_halving >= 10 * self.num_slots:
            self._since_halving = 0
            self._uses = {key: uses // 2 for key, uses in self._uses.items()}
            for priority in range(MAX_USES // 2 + 1):
                self._pool.set_priority(
                    [key for key, uses in self._uses.items() if uses == priority], priority
                )
