"""Layouts of a KV cache in memory: byte arithmetic, compatibility of two caches, and the heads that ranks of
two caches share. Without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from shoal.errors import UserError

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class LayoutError(UserError):
    """A cache that cannot be, or two that do not go together."""


class Layout(StrEnum):
    """The order of a layer's axes, and the order of layers in memory. Heads are one rank's."""

    KV_FIRST = "kv_first"  # [planes, blocks, block_size, heads, head_dim], layer after layer
    BLOCK_FIRST = "block_first"  # [blocks, planes, block_size, heads, head_dim], layer after layer
    # [blocks, layers, planes, heads, block_size, head_dim]: a block of all layers is one piece (the engine's)
    WHOLE_BLOCKS = "whole_blocks"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of one layer, outermost first."""
        return {
            "kv_first": ("kv", "block", "token", "head", "item"),
            "block_first": ("block", "kv", "token", "head", "item"),
            "whole_blocks": ("block", "kv", "head", "token", "item"),
        }[self]


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's cache. It is plain data, so it can be sent to another process.

    Ranks share the KV heads of the model in order. Where there are more ranks than heads, neighbouring ranks
    hold the same head. Raises LayoutError, which msgspec turns into its ValidationError while it decodes.
    """

    layout: Layout
    num_layers: int
    num_heads: int  # KV heads of the model
    head_dim: int
    dtype: str
    block_size: int  # tokens
    num_blocks: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    # Names the scales of all heads of an fp8 cache, by which its numbers are multiplied. Empty: none.
    scales: str = ""
    planes: int = 2  # keys and values; 1: a latent, from which attention computes both
    # Bytes after each block of a WHOLE_BLOCKS cache, with which caches of other layers have blocks as large.
    padding: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "block_size", "num_blocks", "tp_size", "planes"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not isinstance(self.layout, Layout):
            layouts = ", ".join(f"Layout.{layout.name}" for layout in Layout)
            raise LayoutError(f"layout must be one of {layouts}, got {self.layout!r}")
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        if self.padding and self.layout is not Layout.WHOLE_BLOCKS:
            raise LayoutError(
                f"padding must be 0, got {self.padding}; the blocks of a {self.layout} cache have none"
            )
        if self.padding < 0 or self.padding % ITEM_BYTES[self.dtype]:
            raise LayoutError(
                f"padding must be a multiple of the {ITEM_BYTES[self.dtype]} bytes of {self.dtype}, got "
                f"{self.padding}"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(
                f"tp_rank is {self.tp_rank}, but with tp_size {self.tp_size} ranks go from 0 to "
                f"{self.tp_size - 1}"
            )
        if self.num_heads % self.tp_size and self.tp_size % self.num_heads:
            raise LayoutError(
                f"tp_size {self.tp_size} neither divides {self.num_heads} KV heads nor is a multiple of them"
            )

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return max(1, self.num_heads // self.tp_size)

    @property
    def first_head(self) -> int:
        """The number of this rank's first head in the model."""
        return self.tp_rank * self.num_heads // self.tp_size

    @property
    def token_layer_bytes(self) -> int:
        """All planes of a token in a layer, on this rank."""
        return self.planes * self.heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_layer_bytes(self) -> int:
        """A block of one layer, on this rank."""
        return self.token_layer_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """A block over all layers with its padding, on this rank."""
        return self.block_layer_bytes * self.num_layers + self.padding

    @property
    def num_bytes(self) -> int:
        """All blocks over all layers, on this rank."""
        return self.block_bytes * self.num_blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """The cache as one tensor, which has all layers: a `WHOLE_BLOCKS` one has them after the blocks,
        others have them first."""
        layer = self.layer_shape
        if self.layout is Layout.WHOLE_BLOCKS:
            return (layer[0], self.num_layers, *layer[1:])
        return (self.num_layers, *layer)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        sizes = {
            "kv": self.planes,
            "block": self.num_blocks,
            "token": self.block_size,
            "head": self.heads,
            "item": self.head_dim,
        }
        return tuple(sizes[axis] for axis in self.layout.axes)

    @property
    def layer_strides(self) -> tuple[int, ...]:
        """In items."""
        strides = contiguous_strides(self.layer_shape)
        if self.layout is Layout.WHOLE_BLOCKS:
            return (self.block_bytes // ITEM_BYTES[self.dtype], *strides[1:])
        return strides

    def layer_offset(self, layer: int) -> int:
        """The byte offset of a layer in a cache of `num_bytes` consecutive bytes."""
        if self.layout is Layout.WHOLE_BLOCKS:
            return layer * self.block_layer_bytes
        return layer * self.block_layer_bytes * self.num_blocks

    def mismatch(self, other: CacheSpec) -> str | None:
        """Returns a text of the fields that keep copies from making blocks of one cache out of the other's.
        None if a copy can: layouts, numbers of blocks, padding and tensor-parallel sizes may differ."""
        names = ("num_layers", "num_heads", "head_dim", "dtype", "block_size", "scales", "planes")
        values = [(name, getattr(self, name), getattr(other, name)) for name in names]
        differing = [
            f"{name} is {here or 'none'} on one side and {there or 'none'} on the other"
            for name, here, there in values
            if here != there
        ]
        return "; ".join(differing) or None


def opaque_spec(block_bytes: int, num_blocks: int) -> CacheSpec:
    """Describes blocks by their bytes alone, whatever group of layers each belongs to: for copies between
    places that keep blocks as they are."""
    return CacheSpec(Layout.WHOLE_BLOCKS, 1, 1, block_bytes, "uint8", 1, num_blocks, planes=1)


class SharedHeads(NamedTuple):
    """Neighbouring heads that one rank of a source has and one rank of a destination wants. Each rank's heads
    are counted from its own first one."""

    src_rank: int
    src_head: int
    dst_rank: int
    dst_head: int
    num_heads: int


def shared_heads(srcs: Sequence[CacheSpec], dsts: Sequence[CacheSpec]) -> list[SharedHeads]:
    """Says where each head of each destination comes from, in the order of destinations and their heads. All
    entries have the same number of heads.

    `srcs` are ranks of one cache and `dsts` ranks of another, all of them or some. If several sources hold a
    head, destinations take turns among them. Raises LayoutError if blocks of one cache can't become blocks of
    the other, or if no source has a head that a destination wants.
    """
    for specs in (srcs, dsts):
        _check_ranks(specs)
    if reason := srcs[0].mismatch(dsts[0]):
        raise LayoutError(f"these blocks do not go together: {reason}")
    together = math.gcd(srcs[0].heads, dsts[0].heads)  # heads that always share one source
    found = []
    for dst in dsts:
        for i in range(0, dst.heads, together):
            head = dst.first_head + i
            holders = [src for src in srcs if 0 <= head - src.first_head < src.heads]
            if not holders:
                raise LayoutError(
                    f"no source has head {head}: the sources are ranks {[src.tp_rank for src in srcs]} of "
                    f"{srcs[0].tp_size}"
                )
            src = holders[dst.tp_rank % len(holders)]
            found.append(SharedHeads(src.tp_rank, head - src.first_head, dst.tp_rank, i, together))
    return found


def _check_ranks(specs: Sequence[CacheSpec]) -> None:
    """Raises LayoutError unless these are different ranks of one cache."""
    if not specs:
        raise LayoutError("a copy has one source and one destination at least")
    ranks = [spec.tp_rank for spec in specs]
    if len(set(ranks)) < len(ranks):
        raise LayoutError(f"the ranks of one side are {ranks}: each may come once")
    for spec in specs[1:]:
        reason = specs[0].mismatch(spec)
        if spec.tp_size != specs[0].tp_size:
            reason = f"tp_size is {specs[0].tp_size} on one rank and {spec.tp_size} on another"
        if reason:
            raise LayoutError(f"the ranks of one side do not go together: {reason}")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major, in items."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))
