"""Tensors in any storage, without a copy: items, slices, copies, and the same memory in torch, numpy or
DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shoal.kv.layout import CacheSpec, Layout, LayoutError, contiguous_strides
from shoal.kv.storage import Kind, StorageError, in_flight, memory_of
from shoal.kv.view import BlockView, LayerView, ViewError


class TensorView(LayerView):
    """A LayerView that reads, writes and copies its items.

    A view that is not `mutable` gives read-only arrays, and no torch tensors, because those can always be
    written. A view over a direct-I/O file gives neither: it reads and writes the bytes that it spans.
    """

    @classmethod
    def of(cls, array: Any) -> TensorView:
        """Returns a view over the memory of a tensor, an array, or any object that supports DLPack, and keeps
        that memory."""
        tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        return cls(memory_of(tensor), tensor.shape, tensor.dtype, tensor.stride())

    @property
    def is_contiguous(self) -> bool:
        """Says if items lie in row-major order without gaps. A dimension of size 1 may have any stride."""
        expected = contiguous_strides(self.shape)
        return not self.num_items or all(
            size == 1 or a == b for size, a, b in zip(self.shape, self.strides, expected)
        )

    def byte_offset(self, *index: int) -> int:
        """Returns an item's offset in the storage. Raises ViewError for an index outside of the shape."""
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
        """Copies all items, and returns when that is done. Both views may be of the same memory. Raises
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
                f"from {self.storage.kind} to {dst.storage.kind} storage: one side must be a device, "
                "the other host memory"
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
            raise StorageError("device memory can't be a numpy array: copy it to the host first (`d2h`)")
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
        """Says if the two views span a common address. Two storages may cover the same memory."""
        start, other_start = self.storage.address + self.offset, other.storage.address + other.offset
        return start < other_start + other.span and other_start < start + self.span

    def _check_like(self, dst: TensorView) -> None:
        if (self.shape, self.dtype) != (dst.shape, dst.dtype):
            raise ViewError(
                f"shape {self.shape} of {self.dtype} cannot be copied to shape {dst.shape} of {dst.dtype}"
            )


def layer_of(cache: BlockView, i: int, mutable: bool = False) -> TensorView:
    """Returns the view of a layer, read-only unless
    `mutable`."""
    layer = cache.layer(i, mutable)
    return TensorView(layer.storage, layer.shape, layer.dtype, layer.strides, layer.offset, layer.mutable)


def blocks_of(spec: CacheSpec, kv: torch.Tensor) -> BlockView:
    """Returns the blocks of an engine's cache, a tensor [blocks, layers, planes, heads, block_size,
    head_dim]. Raises LayoutError if the spec differs from the tensor."""
    if spec.layout is not Layout.WHOLE_BLOCKS or kv.dim() != 6:
        raise LayoutError(
            f"an engine's cache has 6 dimensions and layout {Layout.WHOLE_BLOCKS}, not {kv.dim()} and "
            f"{spec.layout}"
        )
    storage = memory_of(kv)
    layers = [
        LayerView(storage, layer.shape, kv.dtype, layer.stride(), i * kv.stride(1) * kv.itemsize)
        for i, layer in enumerate(kv.unbind(1))
    ]
    return BlockView(spec, layers)
