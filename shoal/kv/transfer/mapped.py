"""The base of transports that map the owner's memory into this process: a pull is a copy between two caches
(kv/copy.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from shoal.kv.block_map import BlockMap, reachable
from shoal.kv.copy import CopyStream, copy_blocks
from shoal.kv.layout import CacheSpec, LayoutError, SharedHeads, shared_heads
from shoal.kv.storage import Kind, Storage, StorageError
from shoal.kv.transfer.ticket import NO_MESSAGE, ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import TransportError
from shoal.kv.view import BlockView, ViewError

T = TypeVar("T")

# Streams that share the blocks of a pull of all layers: a copy engine pauses between two blocks, and another
# one copies meanwhile.
NUM_STREAMS = 2


@functools.cache
def boot_id() -> str:
    """Names this host, and this run of its kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def one_piece(view: BlockView) -> tuple[int, int]:
    """Returns the address and the bytes of a contiguous cache, as `BlockView.over` makes it. Raises
    TransportError for any other."""
    expected = BlockView.over(
        view.spec, RemoteMemory(view.storage.kind, view.spec.num_bytes, view.storage.device, 0)
    )
    address = int(view.addresses[0])
    if view.strides != expected.strides or (view.addresses - address != expected.addresses).any():
        raise TransportError(
            f"a cache of shape {view.spec.shape} is not contiguous, so others can't read it; "
            "allocate it as one tensor"
        )
    return address, view.spec.num_bytes


def check_fit(specs: Sequence[CacheSpec], into: CacheSpec) -> list[SharedHeads]:
    """Returns which rank has which heads of `into`. Raises TransferError unless these ranks' blocks
    can become blocks of `into`."""
    try:
        return shared_heads(specs, [into])
    except LayoutError as error:
        raise TransferError(
            Failure.INCOMPATIBLE,
            f"{error}; workers that hand blocks over need the same model, dtype and block_size",
        ) from None


def some_layers(view: BlockView, layers: range) -> BlockView:
    """Returns the same blocks with these layers only."""
    spec = replace(view.spec, num_layers=len(layers))
    return BlockView(spec, [view.layer(i, mutable=True) for i in layers])


class RemoteMemory(Storage):
    """Memory of another process, mapped at an address here. Only copies read it, and its creator keeps it
    mapped."""

    def __init__(
        self, kind: Kind, num_bytes: int, device: torch.device, address: int, is_far: bool = False
    ) -> None:
        """`device` reads the memory; `is_far`: over a link to another device."""
        super().__init__(kind, num_bytes, device)
        self._address, self.is_far = address, is_far

    @property
    def address(self) -> int:
        return self._address

    def tensor(self) -> torch.Tensor:
        raise StorageError("another process's memory can't be a tensor here: copy blocks out of it")

    def read(self, offset: int, into: np.ndarray) -> None:
        raise StorageError("another process's memory is read by copies of blocks alone")

    def write(self, offset: int, data: np.ndarray) -> None:
        raise StorageError("another process's memory is only read")

    def _free(self) -> None: ...


def remote_view(export: ExportAddress, memory: RemoteMemory, offset: int) -> BlockView:
    """Returns the cache of an export, at an offset in this memory. Raises TransferError if it does not fit:
    the address comes from another process and is not trusted."""
    try:
        return BlockView.over(export.spec, memory, offset)
    except ViewError as error:
        raise TransferError(
            Failure.INCOMPATIBLE, f"a cache of {export.spec.num_bytes} bytes does not fit there: {error}"
        ) from None


def decode(export: ExportAddress, kind: type[T]) -> T:
    """Decodes a transport's own part of an address. Raises TransferError for anything else."""
    try:
        return msgspec.msgpack.decode(export.memory, type=kind)
    except NO_MESSAGE as error:
        raise TransferError(Failure.DAMAGED, f"not an address of {export.transport}: {error}") from None


class CopyPull:
    """A pull that is a copy: done at once on the host, or when its events have completed."""

    def __init__(self, num_bytes: int, events: Sequence[torch.cuda.Event]) -> None:
        self.num_bytes = num_bytes
        self._events = events

    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def cancel(self) -> None:
        """Waits for the copy: once it is queued it can't be cancelled."""
        for event in self._events:
            event.synchronize()


class MappedPeer:
    """Copies out of `views`, one for each rank of the owner. `release` unmaps their memory."""

    def __init__(self, views: Sequence[BlockView], into: BlockView, release: Callable[[], None]) -> None:
        self._views, self._into, self._release = list(views), into, release
        self._map = BlockMap(self._views, into) if reachable(self._views, [into]) else None
        devices = self._map.devices if self._map is not None else []
        self._device = devices[0] if devices else torch.device("cpu")
        self._streams = [torch.cuda.Stream(self._device) for _ in range(NUM_STREAMS)] if devices else [None]

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range) -> CopyPull:
        num_bytes = len(dst_ids) * len(layers) * self._into.spec.block_layer_bytes
        if self._map is None:  # from plain memory to a device: by way of pinned memory, done when it returns
            copy_blocks(
                [some_layers(view, layers) for view in self._views],
                src_ids,
                some_layers(self._into, layers),
                dst_ids,
            )
            return CopyPull(num_bytes, [])
        if len(layers) < self._map.num_layers:
            copy = CopyStream(self._device, self._streams[0]).stage(self._map, src_ids, dst_ids)
            for layer in layers:
                copy.trigger_layer(layer)
            events = [copy.event(layers[-1])] if layers else []
        else:
            self._map.check_ids(src_ids, dst_ids)  # before anything is queued
            events = []
            try:
                for i, stream in enumerate(self._streams):
                    share = slice(i, None, len(self._streams))
                    copy = CopyStream(self._device, stream).stage(self._map, src_ids[share], dst_ids[share])
                    events.append(copy.trigger_all_layers())
            except BaseException:  # The caller releases the blocks, and nothing else waits for these copies.
                for event in events:
                    if event is not None:
                        event.synchronize()
                raise
        return CopyPull(num_bytes, [event for event in events if event is not None])

    def close(self) -> None:
        self._views, self._map = [], None
        release, self._release = self._release, lambda: None
        release()
