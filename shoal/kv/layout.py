"""What a KV cache looks like in memory: layouts, byte arithmetic, and whether two caches go together. Without
torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

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
    """The order of a layer's axes, and how layers lie beside each other. Heads are those of one rank."""

    KV_FIRST = "kv_first"  # [2, blocks, block_size, heads, head_dim], layer after layer
    BLOCK_FIRST = "block_first"  # [blocks, 2, block_size, heads, head_dim], layer after layer
    # [blocks, layers, 2, heads, block_size, head_dim]: a block of all layers is one piece (the engine's)
    WHOLE_BLOCKS = "whole_blocks"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of one layer, outermost first."""
        return {
            "kv_first": ("kv", "block", "token", "head", "item"),
            "block_first": ("block", "kv", "token", "head", "item"),
            "whole_blocks": ("block", "kv", "head", "token", "item"),
        }[self]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One rank's cache, but for its number of blocks. `num_heads` counts the KV heads of all ranks. Raises
    LayoutError."""

    layout: Layout
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    block_size: int  # tokens
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "block_size", "tp_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}, but must be 1 or more")
        if not isinstance(self.layout, Layout):
            raise LayoutError(
                f"layout {self.layout!r} is none of {', '.join(f'Layout.{layout.name}' for layout in Layout)}"
            )
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(
                f"tp_rank is {self.tp_rank}, but with tp_size {self.tp_size} ranks go from 0 to "
                f"{self.tp_size - 1}"
            )
        if self.tp_size > self.num_heads:
            raise LayoutError(
                f"tp_size is {self.tp_size}, but there are only {self.num_heads} KV heads to share"
            )
        if self.num_heads % self.tp_size:
            raise LayoutError(f"{self.num_heads} KV heads cannot be shared evenly by tp_size {self.tp_size}")

    @property
    def heads(self) -> int:
        """KV heads of this rank: from tp_rank * heads on."""
        return self.num_heads // self.tp_size

    @property
    def token_layer_bytes(self) -> int:
        """Keys and values of a token in a layer, on this rank."""
        return 2 * self.heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_layer_bytes(self) -> int:
        return self.token_layer_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """A block over all layers, on this rank."""
        return self.block_layer_bytes * self.num_layers

    def layer_shape(self, num_blocks: int) -> tuple[int, ...]:
        sizes = {
            "kv": 2,
            "block": num_blocks,
            "token": self.block_size,
            "head": self.heads,
            "item": self.head_dim,
        }
        return tuple(sizes[axis] for axis in self.layout.axes)

    def layer_strides(self, num_blocks: int) -> tuple[int, ...]:
        """In items."""
        strides = contiguous_strides(self.layer_shape(num_blocks))
        return (self.num_layers * strides[0], *strides[1:]) if self.layout is Layout.WHOLE_BLOCKS else strides

    def layer_offset(self, layer: int, num_blocks: int) -> int:
        """Where a layer begins, in bytes, if all of them are in one piece of `num_blocks * block_bytes`."""
        return layer * self.block_layer_bytes * (1 if self.layout is Layout.WHOLE_BLOCKS else num_blocks)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major, in items."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def compatibility(a: CacheSpec, b: CacheSpec, besides: Iterable[str] = ()) -> list[str]:
    """Why a block of one is no block of the other, a text for each field; empty if it is. Numbers of blocks
    may differ, and `besides`."""
    return [
        f"{field.name} is {getattr(a, field.name)} on one side and {getattr(b, field.name)} on the other"
        for field in fields(CacheSpec)
        if field.name not in besides and getattr(a, field.name) != getattr(b, field.name)
    ]
