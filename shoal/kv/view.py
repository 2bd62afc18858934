"""Views of memory that need no copy: a tensor in any storage (`TensorView`), and the blocks of one rank's
cache, a tensor for each layer (`BlockView`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shoal.errors import UserError
from shoal.kv.layout import CacheSpec, Layout, LayoutError, contiguous_strides
from shoal.kv.storage import Kind, Storage, StorageError, in_flight, memory_of


class ViewError(UserError):
    """A view reaches beyond its storage, an index beyond its shape, or two views do not match."""


class TensorView:
    """A tensor of shape `shape` in a storage, from byte `offset` on; `strides` are in items. The storage
    can't be closed as long as the view lives.

    A view that is not `mutable` gives read-only arrays, and no torch tensors, because those can always be
    written. A view over a direct-I/O file gives neither: it reads and writes the bytes that it spans.
    """

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
                "stride for each "
                "dimension, and nothing below 0"
            )
        if (storage.address + offset) % dtype.itemsize:
            raise ViewError(
                f"byte offset {offset} is not aligned for items of {dtype.itemsize} bytes ({dtype})"
            )
        if offset + self.span > storage.num_bytes:
            raise ViewError(
                f"a view of shape {self.shape}, strides {self.strides} and {dtype.itemsize}-byte items from "
                f"byte {offset} on "
                f"would access up to byte offset {offset + self.span}, but the storage has "
                f"{storage.num_bytes} bytes"
            )
        storage.check()
        storage.users.add(self)

    @classmethod
    def of(cls, array: Any) -> TensorView:
        """A view over the memory of a tensor, an array, or any object that supports DLPack. The view keeps
        that memory."""
        tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        return cls(memory_of(tensor), tensor.shape, tensor.dtype, tensor.stride())

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """How many bytes lie between the start of the first item and the end of the last one."""
        if not self.num_items:
            return 0
        return (
            1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        ) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether items lie in row-major order without gaps. A dimension of size 1 may have any stride."""
        expected = contiguous_strides(self.shape)
        return not self.num_items or all(
            size == 1 or a == b for size, a, b in zip(self.shape, self.strides, expected)
        )

    def byte_offset(self, *index: int) -> int:
        """Where an item lies in the storage, in bytes. Raises ViewError for an index outside of the shape."""
        if len(index) != len(self.shape) or not all(0 <= i < size for i, size in zip(index, self.shape)):
            raise ViewError(f"index {index} is outside of shape {self.shape}")
        return self.offset + sum(i * stride for i, stride in zip(index, self.strides)) * self.dtype.itemsize

    def slice(self, dim: int, start: int, end: int) -> TensorView:
        """A view of the items `start` to `end - 1` of a dimension. Raises ViewError."""
        if not 0 <= dim < len(self.shape) or not 0 <= start <= end <= self.shape[dim]:
            raise ViewError(
                f"there is no slice from {start} to {end} of dimension {dim} of shape {self.shape}"
            )
        shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
        return TensorView(
            self.storage,
            shape,
            self.dtype,
            self.strides,
            self.offset + start * self.strides[dim] * self.dtype.itemsize,
            self.mutable,
        )

    def __getitem__(self, index: int | tuple[int, ...]) -> int | float | bool:
        """Reads one item."""
        with self._item(index, False) as item:
            return item.item()

    def __setitem__(self, index: int | tuple[int, ...], value: float) -> None:
        with self._item(index, True) as item:
            item.fill_(value)

    @contextmanager
    def _item(self, index: int | tuple[int, ...], write: bool) -> Iterator[torch.Tensor]:
        offset = self.byte_offset(*index) if isinstance(index, tuple) else self.byte_offset(index)
        with TensorView(self.storage, (), self.dtype, (), offset, self.mutable)._opened(write) as item:
            yield item

    def fill(self, value: float) -> None:
        with self._opened(True) as tensor:
            tensor.fill_(value)

    def copy_to(self, dst: TensorView) -> None:
        """Copies all items, and returns when that is done. Both views may lie in the same memory. Raises
        ViewError for another shape or dtype."""
        self._check_like(dst)
        with self._opened(False) as source, dst._opened(True) as target:
            target.copy_(source.clone() if self._meets(dst) else source)
            for tensor in (source, target):
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()

    def h2d(self, dst: TensorView, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Queues a copy from the host to a device on `stream` (default: the current one). Returns the event
        of its end. Only a copy from pinned memory is asynchronous. Raises ViewError."""
        return self._queue(dst, stream, dst)

    def d2h(self, dst: TensorView, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Queues a copy from a device to the host, otherwise as `h2d`."""
        return self._queue(dst, stream, self)

    def _queue(
        self, dst: TensorView, stream: torch.cuda.Stream | None, on_device: TensorView
    ) -> torch.cuda.Event:
        self._check_like(dst)
        on_host = self if on_device is dst else dst
        if on_device.storage.kind is not Kind.DEVICE or on_host.storage.kind in (Kind.DEVICE, Kind.DIRECT):
            raise ViewError(
                f"from {self.storage.kind} to {dst.storage.kind} storage is no such copy: one side is a "
                "device's, the other "
                "host memory"
            )
        event = torch.cuda.Event()
        with torch.cuda.stream(stream or torch.cuda.current_stream(on_device.storage.device)):
            dst._tensor(True).copy_(self._tensor(False), non_blocking=True)
            event.record()
        in_flight.keep(event, self, dst)
        return event

    def tensor(self) -> torch.Tensor:
        """Returns a tensor over the same memory, which it keeps by itself. Raises ViewError if the view is
        not mutable, and StorageError for a file without memory."""
        return self._tensor(True)

    def array(self) -> np.ndarray:
        """Returns an array over the same memory. Raises ViewError if numpy has no such dtype, and
        StorageError if the memory is not on the host."""
        if self.storage.kind is Kind.DEVICE:
            raise StorageError("device memory is no numpy array: copy it to the host first (`d2h`)")
        try:
            array = self._tensor(False).numpy()
        except TypeError:
            raise ViewError(
                f"numpy has no {self.dtype}: look at the bytes through a view of torch.uint8 or torch.int16"
            ) from None
        if not self.mutable:
            array.flags.writeable = False
        return array

    def __dlpack__(self, **options: Any) -> object:
        return self.tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor().__dlpack_device__()

    def _tensor(self, write: bool) -> torch.Tensor:
        if write and not self.mutable:
            raise ViewError("the view is read-only: ask for a mutable one")
        memory = self.storage.tensor()[self.offset : self.offset + self.span].view(self.dtype)
        return memory.as_strided(self.shape, self.strides)

    @contextmanager
    def _opened(self, write: bool) -> Iterator[torch.Tensor]:
        """Gives the tensor, or for a direct-I/O file a copy of it, which is written back afterwards."""
        if self.storage.kind is not Kind.DIRECT or (write and not self.mutable):
            yield self._tensor(write)
            return
        span = np.empty(self.span, np.uint8)
        self.storage.read(self.offset, span)
        yield torch.from_numpy(span).view(self.dtype).as_strided(self.shape, self.strides)
        if write:
            self.storage.write(self.offset, span)

    def _meets(self, other: TensorView) -> bool:
        """Whether the two views span a common address. Two storages may lie over the same memory."""
        start, other_start = self.storage.address + self.offset, other.storage.address + other.offset
        return start < other_start + other.span and other_start < start + self.span

    def _check_like(self, dst: TensorView) -> None:
        if (self.shape, self.dtype) != (dst.shape, dst.dtype):
            raise ViewError(
                f"shape {self.shape} of {self.dtype} cannot be copied to shape {dst.shape} of {dst.dtype}"
            )


class BlockView:
    """The blocks of one rank's cache, with a view of each layer. Raises LayoutError if a layer is not what
    the spec says."""

    def __init__(self, spec: CacheSpec, layers: Sequence[TensorView]) -> None:
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
                    f"layer {i} lies in {layer.storage.kind} storage on {layer.storage.device}, the first in "
                    f"{first.storage.kind} on {first.storage.device}: a cache lies in one kind"
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
        """A cache that lies in one piece of `spec.num_bytes` bytes of a storage, from byte `offset` on.
        Raises ViewError if the storage is too small."""
        shape, strides, dtype = spec.layer_shape, spec.layer_strides, getattr(torch, spec.dtype)
        layers = range(spec.num_layers)
        return cls(
            spec, [TensorView(storage, shape, dtype, strides, offset + spec.layer_offset(i)) for i in layers]
        )

    @classmethod
    def of(cls, spec: CacheSpec, kv: torch.Tensor) -> BlockView:
        """An engine's cache, which is a tensor [blocks, layers, 2, heads, block_size, head_dim]. Raises
        LayoutError if the spec says otherwise."""
        if spec.layout is not Layout.WHOLE_BLOCKS or kv.dim() != 6:
            raise LayoutError(
                f"an engine's cache has 6 dimensions and layout {Layout.WHOLE_BLOCKS}, not {kv.dim()} and "
                f"{spec.layout}"
            )
        storage = memory_of(kv)
        layers = [
            TensorView(storage, layer.shape, kv.dtype, layer.stride(), i * kv.stride(1) * kv.itemsize)
            for i, layer in enumerate(kv.unbind(1))
        ]
        return cls(spec, layers)

    @property
    def storage(self) -> Storage:
        """The storage of the first layer; the others' are of the same kind."""
        return self._layers[0].storage

    def layer(self, i: int, mutable: bool = False) -> TensorView:
        """The view of a layer, which is read-only unless it is asked for as mutable."""
        if not 0 <= i < len(self._layers):
            raise LayoutError(f"layer {i} does not exist: layers go from 0 to {len(self._layers) - 1}")
        layer = self._layers[i]
        return TensorView(
            layer.storage, layer.shape, layer.dtype, layer.strides, layer.offset, mutable and layer.mutable
        )

    def overlaps(self, other: BlockView) -> bool:
        """Whether the layers of both span a common byte, be it one between two items."""
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
