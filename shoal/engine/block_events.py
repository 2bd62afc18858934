"""`BlockEvents`: the part of an engine that publishes which KV blocks its device has, one batch a step.
kv/events/publisher.py sends the batches; the tiers below the device report their own blocks to it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.scheduling.grouped_blocks import GroupedBlocks
from shoal.engine.scheduling.sequence import Sequence as EngineSequence
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.engine.step_part import StepPart
from shoal.hashing import group_key
from shoal.kv.events.publisher import KvEvents
from shoal.kv.events.reported_groups import LongBlocks, ReportedGroups
from shoal.kv_events import GPU


class BlockEvents(StepPart):
    """`events` outlives the engine if another model takes its place, so it is not closed here."""

    def __init__(self, events: KvEvents, blocks: SequenceBlocks) -> None:
        self._events, self._blocks = events, blocks
        self._states = blocks if isinstance(blocks, StateBlocks) else None
        self._grouped = blocks if isinstance(blocks, GroupedBlocks) and self._states is None else None
        self._reported = ReportedGroups(blocks.groups, blocks.block_size)
        # For groups with shorter blocks than the reported ones, by the number under which a group is reported
        self._long: dict[int, LongBlocks] = {}
        self._published: set[bytes] = set()  # with states: the keys that are published and not removed
        blocks.pool.listeners.append(self)
        if self._states is not None:
            self._states.snapshots.listeners.append(self)

    def registered(self, seq: EngineSequence, start: int, blocks: Sequence[int], group: int) -> None:
        """A block that stays a copy is not published. A block is published when all groups that are
        reported as one have all of it (kv/events/reported_groups.py)."""
        if self._states is not None or not (alike := self._reported.alike[group]):
            return
        size, unit = self._blocks.groups[group].block_size, self._reported.units[group]
        if len(alike) == 1 and size == unit:
            key_of = self._blocks.pool.key_of
            self._publish(seq, start, [key_of(block) is not None for block in blocks], group)
            return
        find, first = self._blocks.pool.find, start * size // unit
        num_known = len(seq.keys) * self._blocks.block_size // unit
        end = min(-(-(start + len(blocks)) * size // unit), num_known)
        are_findable = [
            all(find(key) is not None for key in self._reported.parts(seq.keys, number, group))
            for number in range(first, end)
        ]
        self._publish(seq, first, are_findable, alike[0])
        if any(self._blocks.groups[g].block_size < unit for g in alike):
            long, step = self._long.setdefault(alike[0], LongBlocks()), unit // self._blocks.block_size
            for number, is_findable in enumerate(are_findable, first):
                if is_findable:
                    long.add(seq.keys[number * step : (number + 1) * step])

    def kept(self, seq: EngineSequence, end: int) -> None:
        """Publishes the blocks up to a snapshot, as a prompt can continue only after one."""
        pool, size = self._blocks.pool, self._blocks.groups[0].block_size
        step, end = size // self._blocks.block_size, end // size
        keys, start = seq.keys[step - 1 : end * step : step], end
        while start and keys[start - 1] not in self._published:
            start -= 1
        self._publish(seq, start, [pool.find(key) is not None for key in keys[start:]])
        self._published.update(key for key in keys[start:] if pool.find(key) is not None)
        self._events.snapshot_kept(keys[-1], GPU, True)

    def _publish(self, seq: EngineSequence, start: int, are_findable: Sequence[bool], group: int = 0) -> None:
        """Publishes the findable ones of the sequence's blocks from `start` on, which are as long as
        reported ones. An event has a run of adjacent blocks, which began at `run`."""
        size, window = self._reported.units[group], self._blocks.groups[group].window
        window = None if self._states is not None else window  # snapshots say where a prompt can continue
        step = size // self._blocks.block_size  # keys of the chain for a block
        end, run = start + len(are_findable), start
        for i in range(start, end + 1):
            if i < end and are_findable[i - start]:
                continue
            if run < i:
                self._events.stored(
                    seq.keys[(run + 1) * step - 1 : i * step : step],
                    seq.keys[run * step - 1] if run else None,
                    seq.token_ids[run * size : i * size],
                    seq.request.adapter,
                    seq.request.cache_salt,
                    has_states=self._states is not None,
                    group=group,
                    window=window,
                )
            run = i + 1

    # Calls of the pool and of the snapshots

    def snapshot_removed(self, key: bytes) -> None:
        if self._blocks.pool.find(key) is not None:  # otherwise the block is removed, too
            self._events.snapshot_kept(key, GPU, False)

    def removed(self, key: bytes, block: int) -> None:
        self._published.discard(key)
        if self._grouped is None:
            self._events.removed(key)
        elif alike := self._reported.alike[group := self._grouped.group_of(block)]:
            long, of_chain = self._long.get(alike[0]), group_key(key, group)
            for gone in [of_chain] if long is None else long.with_key(of_chain):
                self._events.removed(gone, alike[0])
                if long is not None:
                    long.remove(gone)

    def cleared(self) -> None:
        self._published.clear()
        self._long.clear()
        self._events.cleared()
        self._events.flush()  # the next step, which would do it, may be far away

    # Around a step, and the rest

    def after_step(self, waits: bool) -> None:
        self._events.flush()

    def tick(self) -> bool:
        self._events.flush()
        return False

    def after_reset(self) -> None:
        self._events.flush()

    def start_anew(self) -> None:
        self._events.flush()

    def check(self) -> None:
        has_others = self._states is not None or len(self._blocks.groups) > 1
        self._events.check(self._blocks.pool.cached_keys(), has_others)

    def close(self) -> None:
        self._blocks.pool.listeners.remove(self)
        if self._states is not None:
            self._states.snapshots.listeners.remove(self)
