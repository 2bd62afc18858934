"""`StateFetches`: `GroupedFetches` of a model with recurrent layers. A fetch brings a snapshot, too, unless
the device has it: its parts come after the KV blocks, and all are of use only together."""

from __future__ import annotations

from shoal.engine.scheduling.fetches import Fetch, Source
from shoal.engine.scheduling.grouped_fetches import GroupedFetches
from shoal.engine.scheduling.part_state import states_of
from shoal.engine.scheduling.seams import BlockWatcher
from shoal.engine.scheduling.sequence import Sequence
from shoal.hashing import part_key
from shoal.kv.groups import NO_BLOCK
from shoal.kv.places import longest_end
from shoal.kv.snapshots import Snapshots, StateSnapshot


class StateFetches(GroupedFetches):
    """From its begin to its end a fetch has a pin on its snapshot."""

    snapshots: Snapshots
    watchers: list[BlockWatcher]
    _taken: StateSnapshot  # by `_take_more`

    def arrived(self, fetch: Fetch, num_blocks: int) -> bool:
        seq, snapshot, snapshots = fetch.seq, fetch.snapshot, self.snapshots
        assert snapshot is not None
        has_all = num_blocks == len(fetch.keys)
        key = seq.keys[fetch.end // self._block_size - 1]
        is_new = has_all and fetch.findable and snapshots.is_new(snapshot) and snapshots.find(key) is None
        if is_new:
            snapshots.register(snapshot, key)
        if has_all and seq.fetch is fetch:
            states = states_of(seq)
            states.restored, states.kept_at = snapshot, fetch.end
            seq.num_recomputed_tokens = max(0, states.matched - fetch.end)
        else:
            snapshots.unpin(snapshot)
        goes_on = super().arrived(fetch, num_blocks)
        if is_new:
            for watcher in self.watchers:
                watcher.kept(seq, fetch.end)
        return goes_on

    def _furthest(self, seq: Sequence, chain: list[bytes], source: Source) -> int:
        groups, size, step = self._groups, self._block_size, max(group.block_size for group in self._groups)
        has = self._holder(chain, source)
        end, found = (seq.num_tokens - 1) // step * step, -1
        while end != found and end > seq.num_computed:
            end = found = longest_end(groups, end, has)
            while end > seq.num_computed and not self._has_state(seq.keys[end // size - 1], source):
                end -= step
        return end

    def _has_state(self, key: bytes, source: Source) -> bool:
        if self.snapshots.find(key) is not None:
            return True
        return all(source.has(part_key(key, part)) for part in range(self.snapshots.size))

    def _more_keys(self, seq: Sequence, end: int) -> list[bytes]:
        key = seq.keys[end // self._block_size - 1]
        if self.snapshots.find(key) is not None:
            return []
        return [part_key(key, part) for part in range(self.snapshots.size)]

    def _take_more(
        self, seq: Sequence, end: int, tables: list[list[int]], num_blocks: int
    ) -> list[int] | None:
        if not num_blocks:
            snapshot = self.snapshots.find(seq.keys[end // self._block_size - 1])
        else:
            found = [block for table in tables for block in table if block != NO_BLOCK]
            self._pool.hold(found)
            snapshot = self.snapshots.take()
            self._pool.release(found)
        if snapshot is None:
            return None
        self._taken = snapshot
        self.snapshots.pin(snapshot)
        return snapshot.blocks if num_blocks else []

    def _give_more_back(self) -> None:
        self.snapshots.unpin(self._taken)

    def _add(self, source: Source, fetch: Fetch) -> None:
        fetch.snapshot = self._taken
        states = states_of(fetch.seq)
        if states.restored is not None:
            self.snapshots.unpin(states.restored)
            states.restored = None
        super()._add(source, fetch)
