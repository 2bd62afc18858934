"""Layer groups: which layers share a KV block, how many tokens a block has, and which blocks a position
needs.

A block belongs to one group and holds the keys and values of that group's layers. Blocks of all groups have
the same number of bytes, so that one pool, the tiers and transfers know blocks alone. A sequence has a table
of blocks for each group. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

NO_BLOCK = -1  # in a table: the block was given back, or was never needed
MOST_PADDING = 0.15  # share of the blocks of a kind of layer, if there is a choice
MULTIPLES = (4, 2, 1)  # a group's tokens a block, in multiples of the engine's block_size


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share blocks. `layers` are ascending indices of the model's layers; a block may have room
    for more of them."""

    layers: tuple[int, ...]
    block_size: int  # tokens of a block, a multiple of the engine's block_size
    window: int | None = None  # how many positions a token sees, with its own; None: all before it

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_block(self, position: int) -> int:
        """Returns the index of the first block that a token at this position sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Returns the most blocks that a sequence of this length has at once, if a step computes up to
        `chunk` of its tokens."""
        blocks = self.num_blocks(num_tokens)
        return blocks if self.window is None else min(blocks, self.num_blocks(self.window - 1 + chunk) + 1)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The properties that layers with common blocks share."""

    token_bytes: int  # a token's keys and values in one layer, on one rank
    window: int | None = None
    shape: tuple[int, ...] = ()  # the shape of these keys and values


def make_groups(kinds: Sequence[CacheKind | None], block_size: int) -> tuple[tuple[LayerGroup, ...], int]:
    """Returns the groups, those that see everything first, and the bytes of a block. `kinds` has an entry for
    each layer; None: the layer has no cache of its own.

    Layers with fewer bytes a token have more tokens a block, if that makes up for it. Then a block has as
    many layers as padding below MOST_PADDING allows, as that makes the fewest groups. Where no number of
    bytes has so little padding, the one with the least is taken."""
    layers: dict[CacheKind, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            layers.setdefault(kind, []).append(i)
    most_bytes = max(kind.token_bytes for kind in layers)
    multiples = {
        kind: next(size for size in MULTIPLES if size * kind.token_bytes <= most_bytes) for kind in layers
    }
    units = {kind: multiples[kind] * block_size * kind.token_bytes for kind in layers}
    sizes = {units[kind] * number for kind, own in layers.items() for number in range(1, len(own) + 1)}

    def cost(block_bytes: int) -> tuple[float, int, int]:
        counts = {kind: -(-len(own) // (block_bytes // units[kind])) for kind, own in layers.items()}
        padding = max(
            1 - len(own) * units[kind] / (counts[kind] * block_bytes) for kind, own in layers.items()
        )
        return (0.0 if padding <= MOST_PADDING else padding), sum(counts.values()), block_bytes

    block_bytes = min((size for size in sizes if size >= max(units.values())), key=cost)
    groups = []
    for kind, own in layers.items():
        count = -(-len(own) // (block_bytes // units[kind]))
        number = -(-len(own) // count)
        for at in range(0, len(own), number):
            groups.append(LayerGroup(tuple(own[at : at + number]), multiples[kind] * block_size, kind.window))
    groups.sort(key=lambda group: group.window is not None)
    return tuple(groups), block_bytes


def fitting_chunk(
    groups: Sequence[LayerGroup], num_blocks: int, chunk: int, max_model_len: int
) -> tuple[int, int]:
    """Returns the most tokens of one sequence that a step may compute, and the most tokens that a sequence
    may have then. It is up to `chunk`; a cache that is small for the windows gets shorter chunks, down to a
    block, if that makes room for longer sequences."""
    block_size = min(group.block_size for group in groups)
    best = chunk, _room(groups, num_blocks, chunk, max_model_len)
    if any(group.window is not None for group in groups):
        while (chunk := chunk // 2 // block_size * block_size) and best[1] < max_model_len:
            room = _room(groups, num_blocks, chunk, max_model_len)
            if room > best[1]:
                best = chunk, room
    return best


def _room(groups: Sequence[LayerGroup], num_blocks: int, chunk: int, max_model_len: int) -> int:
    """Returns the most tokens up to `max_model_len` for which a sequence has blocks in all groups."""

    def is_too_long(num_tokens: int) -> bool:
        return sum(group.most_blocks(num_tokens, chunk) for group in groups) > num_blocks

    return bisect_left(range(max_model_len + 1), True, key=is_too_long) - 1
