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
from shoal.kv.layout import LayoutError, SharedHeads, shared_heads
from shoal.kv.storage import Kind, Storage, StorageError
from shoal.kv.transfer.ticket import NO_MESSAGE, ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, TransportError
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


def one_piece(views: CacheViews) -> tuple[int, int]:
    """Returns the address and the bytes of a contiguous cache, as `BlockView.over` makes it for each group of
    layers. Raises TransportError for any other."""
    address, num_bytes = int(views[0].addresses[0]), views[0].spec.num_bytes
    for view in views:
        memory = RemoteMemory(view.storage.kind, num_bytes, view.storage.device, 0)
        expected = BlockView.over(view.spec, memory)
        if view.strides != expected.strides or (view.addresses - address != expected.addresses).any():
            raise TransportError(
                f"a cache of shape {view.spec.shape} is not contiguous, so others can't read it; "
                "allocate it as one tensor"
            )
    return address, num_bytes


def check_fit(exports: Sequence[ExportAddress], into: CacheViews) -> list[list[SharedHeads]]:
    """Returns for each group of layers which rank has which heads of `into`. Raises TransferError unless the
    blocks of these ranks, an export of each, can become blocks of `into`."""
    num_groups = len(exports[0].specs)
    try:
        if num_groups != len(into):
            raise LayoutError(
                f"these blocks do not go together: groups of layers are {num_groups} on one side and "
                f"{len(into)} on the other"
            )
        by_group = zip(*(export.specs for export in exports), strict=True)
        return [shared_heads(specs, [view.spec]) for specs, view in zip(by_group, into)]
    except LayoutError as error:
        needed = "model, dtype and block_size"
        # Layers have other groups where ranks outnumber the KV heads of some of them (kv/groups.py).
        if num_groups > 1 and exports[0].specs[0].tp_size != into[0].spec.tp_size:
            needed = "model, dtype, block_size and tensor_parallel_size"
        raise TransferError(
            Failure.INCOMPATIBLE, f"{error}; workers that hand blocks over need the same {needed}"
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


def remote_views(export: ExportAddress, memory: RemoteMemory, offset: int) -> list[BlockView]:
    """Returns the cache of an export, at an offset in this memory. Raises TransferError if it does not fit:
    the address comes from another process and is not trusted."""
    try:
        return [BlockView.over(spec, memory, offset) for spec in export.specs]
    except ViewError as error:
        num_bytes = max(spec.num_bytes for spec in export.specs)
        raise TransferError(
            Failure.INCOMPATIBLE, f"a cache of {num_bytes} bytes does not fit there: {error}"
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
    """Copies out of `views`, one cache for each rank of the owner. `release` unmaps their memory."""

    def __init__(self, views: Sequence[CacheViews], into: CacheViews, release: Callable[[], None]) -> None:
        self._views, self._into, self._release = [list(group) for group in zip(*views)], list(into), release
        self._maps = None
        if reachable(self._views[0], into):
            self._maps = [BlockMap(group, view) for group, view in zip(self._views, into)]
        devices = self._maps[0].devices if self._maps is not None else []
        self._device = devices[0] if devices else torch.device("cpu")
        self._streams = [torch.cuda.Stream(self._device) for _ in range(NUM_STREAMS)] if devices else [None]

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range, group: int = 0) -> CopyPull:
        into = self._into[group]
        num_bytes = len(dst_ids) * len(layers) * into.spec.block_layer_bytes
        if self._maps is None:  # from plain memory to a device: by way of pinned memory, done when it returns
            copy_blocks(
                [some_layers(view, layers) for view in self._views[group]],
                src_ids,
                some_layers(into, layers),
                dst_ids,
            )
            return CopyPull(num_bytes, [])
        block_map = self._maps[group]
        if len(layers) < block_map.num_layers:
            copy = CopyStream(self._device, self._streams[0]).stage(block_map, src_ids, dst_ids)
            for layer in layers:
                copy.trigger_layer(layer)
            events = [copy.event(layers[-1])] if layers else []
        else:
            block_map.check_ids(src_ids, dst_ids)  # before anything is queued
            events = []
            try:
                for i, stream in enumerate(self._streams):
                    share = slice(i, None, len(self._streams))
                    copy = CopyStream(self._device, stream).stage(block_map, src_ids[share], dst_ids[share])
                    events.append(copy.trigger_all_layers())
            except BaseException:  # The caller releases the blocks, and nothing else waits for these copies.
                for event in events:
                    if event is not None:
                        event.synchronize()
                raise
        return CopyPull(num_bytes, [event for event in events if event is not None])

    def close(self) -> None:
        self._views, self._maps = [], None
        release, self._release = self._release, lambda: None
        release()
