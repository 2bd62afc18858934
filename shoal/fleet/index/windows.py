"""`WindowBlocks`: the blocks of one worker's layers that see a window of the last tokens, and how much of a
prefix they leave. indexer.py has the blocks of the other layers.

Such layers need the blocks of the window alone, so a block lost before it takes nothing from a prefix. One
that is lost within the window does: the prefix ends where no window lacks a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from shoal.fleet.index.prefix_tree import DEVICE


@dataclass(slots=True)
class _Tier:
    chains: Counter[int] = field(default_factory=Counter)  # chain hash at a block's end -> number of names
    names: dict[int, int] = field(default_factory=dict)  # the worker's name of a block -> its chain hash


@dataclass(slots=True)
class _Group:
    window: int  # positions that a token sees, with its own
    multiple: int  # a block of the group has this many of the worker's blocks
    tiers: dict[int, _Tier] = field(default_factory=dict)  # those with blocks of the group, now or earlier

    def has_at(self, level: int) -> Callable[[int], bool]:
        """Returns a function that says whether a block is in a tier of this level, by its chain hash."""
        own = [tier.chains for at, tier in self.tiers.items() if at <= level]
        if len(own) == 1:
            return own[0].__contains__
        return lambda chain: any(chain in chains for chains in own)


class WindowBlocks:
    """Blocks by tier. A block is known by the chain hash at its end, in the worker's block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.groups: dict[int, _Group] = {}

    def groups_at(self, level: int) -> dict[int, _Group]:
        """Returns the groups whose blocks on this level are known, by number. Below the device these are the
        groups of which any block was reported there: not all engines do. With group 0, all groups have a
        window."""
        return {
            number: group
            for number, group in self.groups.items()
            if level == DEVICE or any(tier != DEVICE for tier in group.tiers)
        }

    def store(
        self, group: int, window: int, multiple: int, blocks: Iterable[tuple[int, int]], tier: int = DEVICE
    ) -> None:
        """Adds blocks of a group, by name and chain hash."""
        own = self.groups.setdefault(group, _Group(window, multiple)).tiers.setdefault(tier, _Tier())
        for name, chain in blocks:
            self.remove(group, name, tier)
            own.names[name] = chain
            own.chains[chain] += 1

    def remove(self, group: int, name: int, tier: int = DEVICE) -> None:
        """Removes a block by the worker's name; an unknown one changes nothing."""
        of_group = self.groups.get(group)
        own = None if of_group is None else of_group.tiers.get(tier)
        if own is not None and (chain := own.names.pop(name, None)) is not None:
            own.chains[chain] -= 1
            if not own.chains[chain]:
                del own.chains[chain]

    def longest(self, chain: Sequence[int], end: int, level: int = DEVICE) -> int:
        """Returns the most of the chain's first `end` blocks after which every window has its blocks on this
        level, as the worker itself counts (shoal/kv/places.py)."""
        largest = max(group.multiple for group in self.groups.values())
        end, lacks_any = end // largest * largest, True
        groups = [(group, group.has_at(level)) for group in self.groups_at(level).values()]
        while lacks_any:
            lacks_any = False
            for group, has in groups:
                step = group.multiple
                first = max(0, end * self.block_size + 1 - group.window) // (step * self.block_size)
                seen = chain[(first + 1) * step - 1 : end : step]
                if all(map(has, seen)):
                    continue
                end, lacks_any = (first + _last_missing(seen, has)) * step, True
                if end and group.window > 1:  # the next end needs the block before it
                    is_there = map(has, chain[end - 1 :: -step])
                    end = next(compress(range(end, 0, -step), is_there), 0)
                end = end // largest * largest
        return end


def _last_missing(blocks: Sequence[int], has: Callable[[int], bool]) -> int:
    return next(i for i in range(len(blocks) - 1, -1, -1) if not has(blocks[i]))
