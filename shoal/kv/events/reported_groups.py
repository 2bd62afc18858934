"""`ReportedGroups`: the groups of layers that KV events report as one, and the tokens of the blocks that they
report. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.hashing import group_key
from shoal.kv.groups import LayerGroup


class ReportedGroups:
    """`units`: tokens of a reported block, for each group. A listener finds the first group's blocks by their
    tokens, and other groups' blocks where those end, so a reported block is at least as long as the first
    group's: it is stored when all of the group's blocks in it are.

    `alike`: for each group the groups that are reported as one, under the number of the first of them, as
    their blocks come and go together: all with its window and unit. Empty for a group that is not reported,
    as it sees everything with longer blocks than the first group."""

    def __init__(self, groups: Sequence[LayerGroup], block_size: int) -> None:
        """`block_size`: the engine's, of which each group's is a multiple."""
        self.groups, self.block_size = groups, block_size
        first = groups[0].block_size
        self.units = [max(first, group.block_size) for group in groups]
        kinds = [(group.window, unit) for group, unit in zip(groups, self.units)]
        self.alike = [
            [g for g, kind in enumerate(kinds) if kind == own]
            if own[0] is not None or own[1] == first
            else []
            for own in kinds
        ]

    def parts(self, keys: Sequence[bytes], number: int, group: int) -> list[bytes]:
        """Returns the pool's keys of the blocks in the reported block with this number, from 0. `keys`: the
        chain's, one for each `block_size` tokens."""
        unit = self.units[group]
        found = []
        for g in self.alike[group]:
            step = self.groups[g].block_size // self.block_size
            start, end = number * unit // self.block_size, (number + 1) * unit // self.block_size
            found += [group_key(key, g) for key in keys[start + step - 1 : end : step]]
        return found


class LongBlocks:
    """Blocks that each consist of several shorter ones. Several may share their first ones."""

    def __init__(self) -> None:
        self._keys: dict[bytes, Sequence[bytes]] = {}  # the last key of a block -> all of its keys
        self._around: dict[bytes, set[bytes]] = {}  # a key -> the last keys of the blocks that have it

    def add(self, keys: Sequence[bytes]) -> None:
        """Adds a block by the chain's keys in it, the last of which names it."""
        self._keys[keys[-1]] = keys
        for key in keys:
            self._around.setdefault(key, set()).add(keys[-1])

    def keys_of(self, last: bytes) -> Sequence[bytes]:
        """Returns a block's keys."""
        return self._keys[last]

    def with_key(self, key: bytes) -> list[bytes]:
        """Returns the blocks that have this key, by their last ones."""
        return list(self._around.get(key, ()))

    def remove(self, last: bytes) -> None:
        """Removes a block by its last key."""
        for key in self._keys.pop(last):
            self._around[key].discard(last)
            if not self._around[key]:
                del self._around[key]
