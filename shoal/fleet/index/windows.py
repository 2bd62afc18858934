"""`WindowBlocks`: the blocks of one worker's layers that see a window of the last tokens, and how much of a
prefix they leave. indexer.py has the blocks of the other layers.

Such layers need the blocks of the window alone, so a block lost before it takes nothing from a prefix. One
that is lost within the window does: the prefix ends where no window lacks a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress


@dataclass(slots=True)
class _Group:
    window: int  # positions that a token sees, with its own
    multiple: int  # a block of the group has this many of the worker's blocks
    chains: Counter[int] = field(default_factory=Counter)  # chain hash at a block's end -> number of names
    names: dict[int, int] = field(default_factory=dict)  # the worker's name of a block -> its chain hash


class WindowBlocks:
    """Blocks on the device. A block is known by the chain hash at its end, in the worker's block size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.groups: dict[int, _Group] = {}

    @property
    def are_all(self) -> bool:
        """True if the first group has a window, and so all of the worker's groups have one."""
        return 0 in self.groups

    def store(self, group: int, window: int, multiple: int, blocks: Iterable[tuple[int, int]]) -> None:
        """Adds blocks of a group, by name and chain hash."""
        own = self.groups.setdefault(group, _Group(window, multiple))
        for name, chain in blocks:
            self.remove(group, name)
            own.names[name] = chain
            own.chains[chain] += 1

    def remove(self, group: int, name: int) -> None:
        """Removes a block by the worker's name; an unknown one changes nothing."""
        own = self.groups.get(group)
        if own is not None and (chain := own.names.pop(name, None)) is not None:
            own.chains[chain] -= 1
            if not own.chains[chain]:
                del own.chains[chain]

    def longest(self, chain: Sequence[int], end: int) -> int:
        """Returns the most of the chain's first `end` blocks after which every window has its blocks, as the
        worker itself counts (shoal/kv/places.py)."""
        largest = max(group.multiple for group in self.groups.values())
        end, lacks_any = end // largest * largest, True
        while lacks_any:
            lacks_any = False
            for group in self.groups.values():
                step, chains = group.multiple, group.chains
                first = max(0, end * self.block_size + 1 - group.window) // (step * self.block_size)
                seen = chain[(first + 1) * step - 1 : end : step]
                if all(map(chains.__contains__, seen)):
                    continue
                end, lacks_any = (first + _last_missing(seen, chains)) * step, True
                if end and group.window > 1:  # the next end needs the block before it
                    is_there = map(chains.__contains__, chain[end - 1 :: -step])
                    end = next(compress(range(end, 0, -step), is_there), 0)
                end = end // largest * largest
        return end


def _last_missing(blocks: Sequence[int], chains: Container[int]) -> int:
    return next(i for i in range(len(blocks) - 1, -1, -1) if blocks[i] not in chains)
