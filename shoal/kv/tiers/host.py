"""The host tier's index: which slot of the pinned slab holds which KV block, which slots are in use, and
which one is reused next.

A *host block* is a slot of the slab, counted from 0. A copy into or out of a host block, or a write of it
to a file, holds a reference meanwhile: a held block is never reused. The slab itself is memory/slab.py, the
copies are kv/copy.py. For one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.kv.blocks import BlockPool
from shoal.kv.tiers.block_file import BlockMeta, Event
from shoal.kv.tiers.eviction import MAX_USES, check_policy


class HostTier:
    """`capacity` host blocks. Of the blocks without a reference, the least recently used one is reused first
    ("lru"), or the least frequently used one ("lfu": uses while the content is here, up to MAX_USES, halved
    after 10 uses for each host block). With `record_events` the caller must call take_events. Raises
    ConfigError for another policy."""

    def __init__(self, capacity: int, policy: str = "lru", record_events: bool = False) -> None:
        check_policy(policy)
        self.capacity = capacity
        self._pool = BlockPool(capacity, listener=self)
        self._metas: dict[bytes, BlockMeta] = {}
        self._uses: dict[bytes, int] | None = {} if policy == "lfu" else None
        self._since_halving = 0
        self._events: list[Event] | None = [] if record_events else None

    @property
    def num_free(self) -> int:
        """Host blocks that take() could return, with or without content."""
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """KV blocks that can be found here."""
        return len(self._metas)

    def find(self, key: bytes) -> int | None:
        """The host block that has this content. Only hold() makes it safe."""
        return self._pool.find(key)

    def meta(self, key: bytes) -> BlockMeta | None:
        return self._metas.get(key)

    def take(self, num_blocks: int) -> list[int] | None:
        """Host blocks to write into, held; the coldest content makes room. None if too many are held; then
        nothing was taken."""
        return self._pool.try_allocate(num_blocks)

    def put(self, host_block: int, meta: BlockMeta) -> int:
        """Makes the content of a held host block findable, once all its bytes are there. Returns the host
        block that is found from now on: another one, if that is held and has the same content already."""
        found = self._pool.register(host_block, meta.key)
        if meta.key not in self._metas:
            self._metas[meta.key] = meta
            if self._events is not None:
                self._events.append(meta)
        self._used([meta.key])
        return found

    def hold(self, host_blocks: Sequence[int], use: bool = True) -> None:
        """Takes one more reference on each. It counts as a use of the content, unless `use` is False."""
        self._pool.hold(host_blocks)
        if use:
            self._used([key for key in map(self._pool.key_of, host_blocks) if key is not None])

    def release(self, host_blocks: Sequence[int], coldest: bool = False) -> None:
        """Gives back a reference on each. They are in the order of a sequence, whose tail is reused
        before its head. With `coldest` they are in the order of coldest(), and return to where they were."""
        self._pool.release(host_blocks, coldest)

    def forget(self) -> None:
        """Forgets all content: it can't be found any more. Held host blocks stay held."""
        self._pool.reset()

    def coldest(self, num_blocks: int) -> list[tuple[int, BlockMeta]]:
        """Returns up to `num_blocks` host blocks without a reference, with their content, in the order in
        which they will be reused."""
        found = []
        for host_block in self._pool.coldest(num_blocks):
            key = self._pool.key_of(host_block)
            if key is not None:
                found.append((host_block, self._metas[key]))
        return found

    def take_events(self) -> list[Event]:
        """Returns the blocks stored and removed since the last call, in order."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def check(self, held: Iterable[int]) -> None:
        """Checks that pool, metadata and uses agree. `held` names every reference that exists: a host block
        once for each holder."""
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
        """These contents, whose host blocks are held, were used."""
        if self._uses is None:
            return
        for key in keys:
            self._uses[key] = uses = min(self._uses.get(key, 0) + 1, MAX_USES)
            self._pool.set_priority([key], uses)
        self._since_halving += len(keys)
        if self._since_halving >= 10 * self.capacity:
            self._since_halving = 0
            self._uses = {key: uses // 2 for key, uses in self._uses.items()}
            for priority in range(MAX_USES // 2 + 1):
                self._pool.set_priority(
                    [key for key, uses in self._uses.items() if uses == priority], priority
                )
