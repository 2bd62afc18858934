"""`TierBlocks`: reported blocks in the tiers of one medium. A tier reports the block of one group of layers
at a time; groups that are reported as one have a block where all of its parts are (reported_groups.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.hashing import extend_keys, group_key, root_key
from shoal.kv.events.reported_groups import LongBlocks, ReportedGroups
from shoal.kv.tiers.block_file import BlockMeta


class TierBlocks(Protocol):
    """Reported blocks have the chain's keys, as the first group's blocks have."""

    def stored(self, block: BlockMeta) -> list[BlockMeta]:
        """Notes a block of any group. Returns the reported blocks that are whole with it."""
        ...

    def removed(self, key: bytes) -> list[bytes]:
        """Notes that a block of any group is gone. Returns the keys of the reported blocks that are not whole
        without it; others may be among them that were not reported."""
        ...

    def clear(self) -> None: ...


def tier_blocks(reported: ReportedGroups) -> dict[int, TierBlocks]:
    """Returns the blocks of one medium, by the number under which groups are reported."""
    found: dict[int, TierBlocks] = {}
    for alike in reported.alike:
        whole = [g for g in alike if reported.groups[g].block_size == reported.units[g]]
        if alike and (whole == alike or alike[0] == 0):
            found[alike[0]] = WholeBlocks(whole)
        elif alike:
            found[alike[0]] = JoinedBlocks(reported, alike)
    return found


class _Presence:
    """Groups that have their block at each place of a chain. `masks`: the chain's key at a block's end -> a
    bit for each group whose block is there."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self.masks: dict[bytes, int] = {}

    def add(self, block: BlockMeta) -> bytes:
        """Adds a block of one of the groups, and returns the chain's key."""
        key = group_key(block.key, block.group)
        self.masks[key] = self.masks.get(key, 0) | 1 << block.group
        return key

    def remove(self, key: bytes) -> tuple[bytes, int] | None:
        """Removes the block with this key. Returns the chain's key, and the mask with the block; None: no
        group has it."""
        for group in self._groups:
            of_chain, bit = group_key(key, group), 1 << group
            mask = self.masks.get(of_chain, 0)
            if mask & bit:
                self.masks[of_chain] = mask ^ bit
                if mask == bit:
                    del self.masks[of_chain]
                return of_chain, mask
        return None


class WholeBlocks:
    """Blocks of groups whose blocks are as long as the reported ones."""

    def __init__(self, alike: Sequence[int]) -> None:
        self._alike = alike
        self._all = sum(1 << g for g in alike)
        self._there = _Presence(alike)  # It is empty for one group.

    def stored(self, block: BlockMeta) -> list[BlockMeta]:
        if block.group not in self._alike:
            return []
        key = group_key(block.key, block.group)
        if len(self._alike) > 1 and self._there.masks[self._there.add(block)] != self._all:
            return []
        parent = None if block.parent is None else group_key(block.parent, block.group)
        return [BlockMeta(key, parent, block.token_ids, block.extra)]

    def removed(self, key: bytes) -> list[bytes]:
        if len(self._alike) == 1:
            return [group_key(key, self._alike[0])]
        gone = self._there.remove(key)
        return [gone[0]] if gone is not None and gone[1] == self._all else []

    def clear(self) -> None:
        self._there.masks.clear()


class JoinedBlocks:
    """Blocks of groups with shorter blocks than the first group has, whose block in the same medium says
    which short ones make up a reported one."""

    def __init__(self, reported: ReportedGroups, alike: Sequence[int]) -> None:
        self._reported, self._alike = reported, alike
        self._there = _Presence(alike)
        self._first: dict[bytes, BlockMeta] = {}  # the first group's blocks
        self._long = LongBlocks()  # the same, by the chain's keys

    def stored(self, block: BlockMeta) -> list[BlockMeta]:
        if block.group == 0:
            keys: list[bytes] = []
            start = root_key(*block.extra) if block.parent is None else block.parent
            extend_keys(keys, start, list(block.token_ids), self._reported.block_size)
            self._first[block.key] = block
            self._long.add(keys)
            return [block] if self._is_whole(block.key) else []
        if block.group not in self._alike:
            return []
        last_keys = self._long.with_key(self._there.add(block))
        return [self._first[last] for last in last_keys if self._is_whole(last)]

    def removed(self, key: bytes) -> list[bytes]:
        if self._first.pop(key, None) is not None:
            self._long.remove(key)
            return [key]
        gone = self._there.remove(key)
        return [] if gone is None else self._long.with_key(gone[0])

    def clear(self) -> None:
        self._there.masks.clear()
        self._first.clear()
        self._long = LongBlocks()

    def _is_whole(self, last: bytes) -> bool:
        groups, size, keys = self._reported.groups, self._reported.block_size, self._long.keys_of(last)
        return all(
            self._there.masks.get(key, 0) >> group & 1
            for group in self._alike
            for key in keys[groups[group].block_size // size - 1 :: groups[group].block_size // size]
        )
