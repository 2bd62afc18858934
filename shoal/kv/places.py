"""`Place`: a block of a sequence, by group of layers and number. Here is which places a sequence needs to
continue after some of its tokens, and under which keys their blocks are found. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.hashing import group_key
from shoal.kv.blocks import BlockPool
from shoal.kv.groups import NO_BLOCK, LayerGroup


class Place(NamedTuple):
    """A place in the tables of a sequence: the block with this number, from 0, in the table of a group."""

    group: int
    number: int


def places(groups: Sequence[LayerGroup], end: int, also: int | None = None) -> list[Place]:
    """Returns the places of the blocks that a sequence needs to continue after its first `end` tokens, in the
    order in which these tokens fill them. With `also` it can continue after fewer tokens, down to that many,
    too."""
    least = end if also is None else also
    found = [
        (min((i + 1) * group.block_size, end), g, i)
        for g, group in enumerate(groups)
        for i in range(group.first_block(least), group.num_blocks(end))
    ]
    return [Place(g, i) for _, g, i in sorted(found)]


def key_of(place: Place, groups: Sequence[LayerGroup], chain: Sequence[bytes], block_size: int) -> bytes:
    """Returns the key of the block at a place. `chain` has a key for each `block_size` tokens of the
    sequence, and maybe one for a tail (hashing.py), with which the last block of each group is found."""
    step = groups[place.group].block_size // block_size
    return group_key(chain[min((place.number + 1) * step, len(chain)) - 1], place.group)


def longest_end(groups: Sequence[LayerGroup], end: int, has: Callable[[Place], bool]) -> int:
    """Returns the most tokens up to `end` after which a sequence can continue with full blocks of all groups:
    `has` says whether the block at a place is there."""
    for g, group in enumerate(groups):
        if group.window is None:
            num_full = end // group.block_size
            end = next((i for i in range(num_full) if not has(Place(g, i))), num_full) * group.block_size
    return _end_for_windows(groups, end, has)


def match(
    pool: BlockPool, groups: Sequence[LayerGroup], keys: Sequence[bytes], block_size: int
) -> tuple[list[list[int]], int]:
    """Returns the blocks of the longest prefix for which each group has what the next position needs, a table
    for each group, and the prefix's number of tokens. `keys` are the chain's, one for each `block_size`
    tokens. Takes no reference."""
    tables: list[list[int]] = []
    end = len(keys) * block_size
    for g, group in enumerate(groups):
        step = group.block_size // block_size
        own = () if group.window else (group_key(key, g) for key in keys[step - 1 :: step])
        tables.append(pool.match(own))
        if group.window is None:
            end = min(end, len(tables[g]) * group.block_size)
    found: dict[Place, int] = {}

    def has(place: Place) -> bool:
        block = pool.find(key_of(place, groups, keys, block_size))
        if block is not None:
            found[place] = block
        return block is not None

    end = _end_for_windows(groups, end, has)
    for g, group in enumerate(groups):
        num, first = end // group.block_size, group.first_block(end)
        if group.window is None:
            del tables[g][num:]
        else:
            tables[g] = [NO_BLOCK] * min(first, num) + [found[Place(g, i)] for i in range(first, num)]
    return tables, end


def measure(
    pool: BlockPool, groups: Sequence[LayerGroup], keys: Sequence[bytes], block_size: int
) -> tuple[int, int]:
    """Returns the number of tokens of the prefix that `match` finds, and how many of its blocks are held. It
    looks at a few keys only of groups that see everything: there a block is findable, and held, only if all
    before it are (kv/blocks.py)."""

    def block_at(group: int, number: int) -> int | None:
        return pool.find(key_of(Place(group, number), groups, keys, block_size))

    def num_first(group: int, num: int, must_be_held: bool) -> int:
        def is_missing(number: int) -> bool:
            block = block_at(group, number)
            return block is None or (must_be_held and not pool.is_held(block))

        return bisect_left(range(num), True, key=is_missing)

    end = len(keys) * block_size
    for g, group in enumerate(groups):
        if group.window is None:
            end = num_first(g, end // group.block_size, must_be_held=False) * group.block_size
    end = _end_for_windows(groups, end, lambda place: block_at(*place) is not None)
    num_held = 0
    for g, group in enumerate(groups):
        num = end // group.block_size
        if group.window is None:
            num_held += num_first(g, num, must_be_held=True)
        else:
            seen = (block_at(g, i) for i in range(group.first_block(end), num))
            num_held += sum(block is not None and pool.is_held(block) for block in seen)
    return end, num_held


def _end_for_windows(groups: Sequence[LayerGroup], end: int, has: Callable[[Place], bool]) -> int:
    """Returns the most tokens up to `end` after which groups with a window have all that they need, as a
    multiple of the largest block."""
    largest = max(group.block_size for group in groups)
    end = end // largest * largest
    known: dict[Place, bool] = {}
    lacks_any = True
    while lacks_any:
        lacks_any = False
        for g, group in enumerate(groups):
            if group.window is None:
                continue
            for i in range(end // group.block_size - 1, group.first_block(end) - 1, -1):
                place = Place(g, i)
                if place not in known:
                    known[place] = has(place)
                if not known[place]:
                    end, lacks_any = i * group.block_size // largest * largest, True
                    break
    return end
