"""Addresses of a cache in storages: one layer (`LayerView`), and all blocks of one rank (`BlockView`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from shoal.errors import UserError
from shoal.kv.layout import CacheSpec, LayoutError, contiguous_strides
from shoal.kv.storage import Kind, Storage


class ViewError(UserError):
    """A view reaches beyond its storage, an index beyond its shape, or two views do not match."""


class LayerView:
    """A tensor of shape `shape` in a storage, from byte `offset` on; `strides` are in items. The storage
    can't be closed as long as the view lives. Other programs read and write through
    kv/library/tensor_view.py."""

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        mutable: bool = True,
    ) -> None:
        self.storage, self.shape, self.dtype, self.offset, self.mutable = (
            storage,
            tuple(shape),
            dtype,
            offset,
            mutable,
        )
        self.strides = contiguous_strides(self.shape) if strides is None else tuple(strides)
        if (
            len(self.strides) != len(self.shape)
            or min(self.shape, default=0) < 0
            or min(self.strides, default=0) < 0
            or offset < 0
        ):
            raise ViewError(
                f"shape {self.shape}, strides {self.strides} and offset {offset} make no view: it takes a "
                "stride for each dimension, and nothing below 0"
            )
        if (storage.address + offset) % dtype.itemsize:
            raise ViewError(
                f"byte offset {offset} is not aligned for items of {dtype.itemsize} bytes ({dtype})"
            )
        if offset + self.span > storage.num_bytes:
            raise ViewError(
                f"a view of shape {self.shape}, strides {self.strides} and {dtype.itemsize}-byte items from "
                f"byte {offset} on would access up to byte offset {offset + self.span}, but the storage has "
                f"{storage.num_bytes} bytes"
            )
        storage.check()
        storage.users.add(self)

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """The number of bytes from the start of the first item to the end of the last one."""
        if not self.num_items:
            return 0
        return (
            1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        ) * self.dtype.itemsize


class BlockView:
    """The blocks of one rank's cache, with a view of each layer. Raises LayoutError if a layer differs from
    the spec."""

    def __init__(self, spec: CacheSpec, layers: Sequence[LayerView]) -> None:
        self.spec = spec
        self._layers = list(layers)
        if len(layers) != spec.num_layers:
            raise LayoutError(f"{len(layers)} layers were given, but the cache has {spec.num_layers}")
        dtype, shape, first = getattr(torch, spec.dtype), spec.layer_shape, layers[0]
        for i, layer in enumerate(layers):
            if (layer.shape, layer.dtype) != (shape, dtype):
                raise LayoutError(
                    f"layer {i} has shape {layer.shape} of {layer.dtype}, but {spec.num_blocks} blocks of a "
                    f"{spec.layout} cache have {shape} of {dtype}"
                )
            if layer.strides != first.strides or layer.strides[-1] != 1:
                raise LayoutError(
                    f"layer {i} has strides {layer.strides}, the first has {first.strides}: they must agree "
                    "and end with 1"
                )
            if (layer.storage.kind, layer.storage.device) != (first.storage.kind, first.storage.device):
                raise LayoutError(
                    f"layer {i} is in {layer.storage.kind} storage on {layer.storage.device}, the first in "
                    f"{first.storage.kind} on {first.storage.device}: a cache is in one kind"
                )
        self.mutable = all(layer.mutable for layer in layers)
        # Where each layer begins, or its offset in a file that has no addresses. The addresses stay valid, as
        # a storage with views cannot be closed.
        self.addresses = np.array([layer.storage.address + layer.offset for layer in layers], np.int64)
        # By axis, in bytes
        self.strides = dict(zip(spec.layout.axes, (stride * dtype.itemsize for stride in first.strides)))
        self.extents = _united((start, start + first.span) for start in self.addresses.tolist())

    @classmethod
    def over(cls, spec: CacheSpec, storage: Storage, offset: int = 0) -> BlockView:
        """Returns a cache in `spec.num_bytes` consecutive bytes of a storage, from byte `offset` on. Raises
        ViewError if the storage is too small."""
        shape, strides, dtype = spec.layer_shape, spec.layer_strides, getattr(torch, spec.dtype)
        layers = range(spec.num_layers)
        return cls(
            spec, [LayerView(storage, shape, dtype, strides, offset + spec.layer_offset(i)) for i in layers]
        )

    @property
    def storage(self) -> Storage:
        """The storage of the first layer; the others' are of the same kind."""
        return self._layers[0].storage

    def layer(self, i: int, mutable: bool = False) -> LayerView:
        """Returns the view of a layer, read-only unless `mutable`."""
        if not 0 <= i < len(self._layers):
            raise LayoutError(f"layer {i} does not exist: layers go from 0 to {len(self._layers) - 1}")
        layer = self._layers[i]
        return LayerView(
            layer.storage, layer.shape, layer.dtype, layer.strides, layer.offset, mutable and layer.mutable
        )

    def overlaps(self, other: BlockView) -> bool:
        """Says if the spans of both have a common byte, even one between two items."""
        if self.storage.kind is Kind.DIRECT or other.storage.kind is Kind.DIRECT:
            mine, theirs = ({layer.storage for layer in view._layers} for view in (self, other))
            if not mine & theirs:
                return False
        return any(a < d and c < b for a, b in self.extents for c, d in other.extents)


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins spans [start, end) that overlap or touch."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
