"""`TierEvents`: publishes KV events of the tiers below the device. kv/events/reported_groups.py says which
groups of layers are reported as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.hashing import part_key
from shoal.kv.events.publisher import KvEvents
from shoal.kv.events.reported_groups import ReportedGroups
from shoal.kv.events.tier_blocks import tier_blocks
from shoal.kv.tiers.block_file import BlockMeta, Event
from shoal.kv_events import CPU, STORAGE


class TierEvents:
    """`has_below`: says whether a tier has the block with this key."""

    def __init__(self, events: KvEvents, blocks: SequenceBlocks, has_below: Callable[[bytes], bool]) -> None:
        self._events, self._blocks, self._has_below = events, blocks, has_below
        self._has_states = isinstance(blocks, StateBlocks)
        # With recurrent layers: the keys of the blocks after which a tier has a snapshot
        self._snapshots: dict[str, set[bytes]] = {CPU: set(), STORAGE: set()}
        reported = ReportedGroups(blocks.groups, blocks.block_size)
        self._by_group = {medium: tier_blocks(reported) for medium in (CPU, STORAGE)}

    def publish(self, medium: str, news: Sequence[Event]) -> None:
        """Publishes which blocks the tiers of a medium have stored and removed."""
        if self._has_states:
            self._publish_with_snapshots(medium, news)
            return
        # The first group comes first, as a listener finds the place of other blocks by its blocks.
        for group, blocks in self._by_group[medium].items():
            window = self._blocks.groups[group].window
            for item in news:
                if isinstance(item, bytes):
                    for key in blocks.removed(item):
                        self._events.removed_below(key, medium, group)
                    continue
                for block in blocks.stored(item):
                    self._events.stored(
                        [block.key],
                        block.parent,
                        block.token_ids,
                        *block.extra,
                        medium,
                        group=group,
                        window=window,
                    )

    def _publish_with_snapshots(self, medium: str, news: Sequence[Event]) -> None:
        """Reports the first group alone, as the snapshots say where a prompt can continue."""
        events, kept = self._events, self._snapshots[medium]
        for item in news:
            if isinstance(item, bytes):
                events.removed_below(item, medium)
                if (of_block := part_key(item, 0)) in kept:
                    kept.remove(of_block)
                    events.snapshot_kept(of_block, medium, False)
            elif item.group == 0:
                events.stored([item.key], item.parent, item.token_ids, *item.extra, medium, has_states=True)
                if item.key in kept:
                    events.snapshot_kept(item.key, medium, True)
            elif self._is_first_part(item):
                kept.add(of_block := part_key(item.key, 0))
                events.snapshot_kept(of_block, medium, True)

    def _is_first_part(self, item: BlockMeta) -> bool:
        """Returns whether this is the first part of a snapshot, which stands for all of them in events. The
        keys of other parts lead to no block."""
        of_block = part_key(item.key, 0)
        is_part = item.group == len(self._blocks.groups)
        return is_part and (self._blocks.pool.find(of_block) is not None or self._has_below(of_block))

    def cleared(self, medium: str) -> None:
        """Publishes that the tiers of a medium have no blocks any more."""
        self._snapshots[medium].clear()
        for blocks in self._by_group[medium].values():
            blocks.clear()
        self._events.cleared(medium)

    def flush(self) -> None:
        self._events.flush()
