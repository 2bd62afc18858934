"""Copies of KV blocks, named by lists of ids, between what a BlockMap connects.

On a device a copy is queued on a stream, and an event marks its end; between host memories it is done when
the call returns. A caller that overwrites a block first waits for the event.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from shoal.kernels.copy.block_copy import Pieces, bytes_at, copy_by_dma, copy_on_host, runs
from shoal.kv.block_map import (
    BlockCopyError,
    BlockMap,
    Ids,
    Shards,
    as_shards,
    check_apart,
    check_ids,
    check_memory,
    pieces_between,
    reachable,
)
from shoal.kv.layout import shared_heads
from shoal.kv.storage import Kind, host_memory, in_flight, pinned_memory
from shoal.kv.view import BlockView

STAGING_BYTES = 64 << 20  # staged at a time, between sides that no processor reaches


class CopyStream:
    """Copies blocks on a stream of its own, so that they run alongside what the device computes. It waits for
    nothing by itself: call `copying.stream.wait_stream(compute)` or trigger after an event where a copy
    needs what is being computed. Not for several threads. On the CPU there is no stream.

        block_map = BlockMap(src, dst)                         # once for a direction
        copying = CopyStream("cuda")
        copy = copying.stage(block_map, src_ids, dst_ids)
        copy.trigger_layer(0, after=computed)                  # while layer 1 is computed
        copy.trigger_all_layers()                              # the layers that are left
        copy.wait_layer(0, compute)                            # an event, not a synchronization
    """

    def __init__(self, device: torch.device | str, stream: torch.cuda.Stream | None = None) -> None:
        self.device, self.stream = torch.device(device), stream
        if self.device.type == "cuda":
            self.stream = stream or torch.cuda.Stream(self.device)
            self.device = self.stream.device  # with its index

    def stage(self, block_map: BlockMap, src_ids: Ids, dst_ids: Ids) -> StagedCopy:
        """Makes a copy ready, and copies nothing yet. Block dst_ids[i] of every destination is to become
        block src_ids[i]. Several staged copies may be under way. Raises BlockCopyError if the ids do not go
        together, or if the map does not reach this stream's device."""
        devices = block_map.devices or [torch.device("cpu")]
        if self.device not in devices:
            names = " and ".join(map(str, devices))
            raise BlockCopyError(f"a copy stream of {self.device} does not copy between memories of {names}")
        return StagedCopy(self, block_map, *block_map.check_ids(src_ids, dst_ids))

    def synchronize(self) -> None:
        """Returns when what was triggered is done."""
        if self.stream is not None:
            self.stream.synchronize()
            in_flight.release_done()


class StagedCopy:
    """One copy of certain blocks, which is set off layer by layer, in whatever order. On the CPU a layer is
    copied when it is triggered. CopyStream.stage makes it."""

    def __init__(
        self, copying: CopyStream, block_map: BlockMap, src_ids: np.ndarray, dst_ids: np.ndarray
    ) -> None:
        self._stream, self._device = copying.stream, copying.device
        self._map, self._ids = block_map, (src_ids, dst_ids)
        self._device_ids: torch.Tensor | None = None  # once a kernel has needed them
        self._triggered = [False] * block_map.num_layers
        self._events: list[torch.cuda.Event | None] = [None] * block_map.num_layers
        self._last_event: torch.cuda.Event | None = None

    def trigger_layer(self, layer: int, after: torch.cuda.Event | None = None) -> None:
        """Sets off a layer, after an event if one is given. A second call does nothing."""
        self._check(layer)
        if not self._triggered[layer]:
            self._start(layer, [layer], after)

    def trigger_all_layers(self) -> torch.cuda.Event | None:
        """Sets off the layers that have not been triggered, as one copy if none has. Returns the event of the
        end of all layers; None on the CPU, where the copy is done."""
        if not any(self._triggered):
            self._start(-1, range(self._map.num_layers))
        for layer in range(self._map.num_layers):
            self.trigger_layer(layer)
        return self._last_event

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Has a stream (default: the current one) wait for a layer, which has been triggered. On the CPU
        there is nothing to wait for. Raises BlockCopyError."""
        self._check(layer)
        if not self._triggered[layer]:
            raise BlockCopyError(
                f"layer {layer} has not been triggered: waiting for it would wait for nothing"
            )
        if (event := self._events[layer]) is not None:
            (stream or torch.cuda.current_stream(self._device)).wait_event(event)

    def event(self, layer: int) -> torch.cuda.Event | None:
        """The event of a layer's end; None before the layer is triggered, and on the CPU."""
        self._check(layer)
        return self._events[layer]

    def _start(self, which: int, layers: Iterable[int], after: torch.cuda.Event | None = None) -> None:
        """`which`: the index into the map's pieces."""
        event = None
        if self._stream is None:
            for pieces in self._map.pieces[which]:
                copy_on_host(pieces, *self._ids)
        else:
            if after is not None:
                self._stream.wait_event(after)
            if len(self._ids[0]):
                for i, pieces in enumerate(self._map.pieces[which]):
                    self._queue(which, i, pieces)
            self._last_event = event = self._stream.record_event()
            in_flight.keep(event, self._map)
        for layer in layers:
            self._triggered[layer], self._events[layer] = True, event

    def _queue(self, which: int, i: int, pieces: Pieces) -> None:
        assert self._stream is not None
        if self._map.goes_by_dma(pieces):
            copy_by_dma(*runs(pieces, *self._ids), pieces.run, self._stream)
            return
        from shoal.kernels.copy.block_copy_triton import copy_by_kernel  # only now: a CPU run may lack Triton

        with torch.cuda.stream(self._stream):
            if self._device_ids is None:
                ids = torch.from_numpy(np.concatenate(self._ids)).pin_memory()
                self._device_ids = ids.to(self._device, non_blocking=True)
            copy_by_kernel(pieces, self._map.addresses(self._device)[which][i], self._device_ids)

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self._map.num_layers:
            raise BlockCopyError(
                f"layer {layer} does not exist: layers go from 0 to {self._map.num_layers - 1}"
            )


def copy_blocks(
    srcs: Shards, src_ids: Ids, dsts: Shards, dst_ids: Ids, stream: torch.cuda.Stream | None = None
) -> torch.cuda.Event | None:
    """One copy of all layers between any kinds of storage, for which no map has to be made.

    Without a stream it is an operation of the current one; on a stream of the caller's it waits for nothing.
    Returns the event of its end, or None if it is done. What no processor reaches, as plain memory from a
    device, or a file, passes through memory in between, and is done when this returns. Raises LayoutError and
    BlockCopyError.
    """
    srcs, dsts = as_shards(srcs), as_shards(dsts)
    shared_heads([view.spec for view in srcs], [view.spec for view in dsts])  # refuses other pairs first
    if not reachable(srcs, dsts):
        is_one_cache = check_memory(srcs, dsts)
        from_ids, to_ids = check_ids(src_ids, srcs, dst_ids, dsts)
        if is_one_cache:
            check_apart(from_ids, to_ids)
        if len(from_ids):
            _copy_in_between(srcs, from_ids, dsts, to_ids, stream)
        return None
    block_map = BlockMap(srcs, dsts)
    copying = after_current(block_map.devices, stream)
    event = copying.stage(block_map, src_ids, dst_ids).trigger_all_layers()
    if event is not None and copying.stream is not stream:
        (stream or torch.cuda.current_stream(copying.device)).wait_event(event)
    return event


def after_current(devices: Sequence[torch.device], stream: torch.cuda.Stream | None) -> CopyStream:
    """Returns a CopyStream on `stream` if one of the devices owns it, otherwise on a private stream that
    has waited for it or for the current one. Default streams are waited for too, because the copy engines'
    batches do not accept them."""
    if not devices:
        return CopyStream("cpu")
    if stream is not None and stream.cuda_stream and stream.device in devices:
        return CopyStream(stream.device, stream)
    ours = _side_stream(devices[0])
    ours.wait_stream(stream or torch.cuda.current_stream(devices[0]))
    return CopyStream(devices[0], ours)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_in_between(
    srcs: Sequence[BlockView],
    src_ids: np.ndarray,
    dsts: Sequence[BlockView],
    dst_ids: np.ndarray,
    stream: torch.cuda.Stream | None,
) -> None:
    """By way of memory that both sides reach. It has the specs of the side that nothing else can reach."""
    kinds = {srcs[0].storage.kind, dsts[0].storage.kind}
    like_source = srcs[0].storage.kind is Kind.DIRECT or dsts[0].storage.kind is Kind.DEVICE
    shards = srcs if like_source else dsts
    block_bytes = sum(shard.spec.block_bytes for shard in shards)
    num_blocks = min(len(src_ids), max(1, STAGING_BYTES // block_bytes))
    allocate = pinned_memory if Kind.DEVICE in kinds else host_memory
    specs = [replace(shard.spec, num_blocks=num_blocks) for shard in shards]
    between = [BlockView.over(spec, allocate(spec.num_bytes)) for spec in specs]
    there, on = (_copy_alike, copy_blocks) if like_source else (copy_blocks, _copy_alike)
    for start in range(0, len(src_ids), num_blocks):
        from_ids, to_ids = src_ids[start : start + num_blocks], dst_ids[start : start + num_blocks]
        ids = np.arange(len(from_ids))
        event = there(srcs, from_ids, between, ids, stream)
        if event is not None:
            event.synchronize()
        event = on(between, ids, dsts, to_ids, stream)
        if event is not None:
            event.synchronize()


def _copy_alike(
    srcs: Sequence[BlockView],
    src_ids: np.ndarray,
    dsts: Sequence[BlockView],
    dst_ids: np.ndarray,
    stream: torch.cuda.Stream | None,
) -> torch.cuda.Event | None:
    """As copy_blocks, between shards of equal specs. One side may be a file that has no memory."""
    if reachable(srcs, dsts):
        return copy_blocks(srcs, src_ids, dsts, dst_ids, stream)
    for src, dst in zip(srcs, dsts):
        _copy_file(src, src_ids, dst, dst_ids)
    return None


def _copy_file(src: BlockView, src_ids: np.ndarray, dst: BlockView, dst_ids: np.ndarray) -> None:
    """Between a direct-I/O file and memory of the same spec. Layers may have files of their own."""
    file = src if src.storage.kind is Kind.DIRECT else dst
    storages = [file.layer(i).storage for i in range(file.spec.num_layers)]
    shares = shared_heads([src.spec], [dst.spec])
    for storage in dict.fromkeys(storages):
        layers = [i for i, its in enumerate(storages) if its is storage]
        (pieces,) = pieces_between([src], [dst], shares, layers)
        for source, target in zip(*(addresses.tolist() for addresses in runs(pieces, src_ids, dst_ids))):
            if file is src:
                storage.read(source, bytes_at(target, pieces.run).numpy())
            else:
                storage.write(target, bytes_at(source, pieces.run).numpy())
