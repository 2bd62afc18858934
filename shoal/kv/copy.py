"""Copies of KV blocks, named by lists of ids: from any storage to any storage, between any layouts.

On a device a copy is queued on a stream and told by an event; between host memories it is done when the call
returns. A caller that overwrites a block first waits for the event. A copy on the caller's own stream waits
for nothing by itself (`stream.wait_stream(compute)` comes before); without one it is an operation of the
current stream.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from shoal.errors import UnavailableError, UserError
from shoal.kernels.block_copy import Pieces, bytes_at, copy_by_dma, copy_on_host, join, runs
from shoal.kv.layout import ITEM_BYTES, shared_heads
from shoal.kv.storage import Kind, host_memory, in_flight, pinned_memory
from shoal.kv.view import BlockView

# Runs of this many bytes and more cross PCIe by the copy engines, shorter ones by a kernel: a descriptor
# costs what 64 KiB cost.
DMA_BYTES = 256 << 10
STAGING_BYTES = 64 << 20  # what passes through memory that both sides reach, at a time
Ids = Sequence[int] | np.ndarray


class BlockCopyError(UserError):
    """Ids, shapes or memories that do not go together."""


class NoFreeCopyStreamError(UnavailableError):
    """All streams of a pool are in use."""


def gather_blocks(
    kv: torch.Tensor,
    block_ids: Sequence[int],
    slab: torch.Tensor,
    host_blocks: Sequence[int],
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Event | None:
    """slab[host_blocks[i]] = kv[block_ids[i]]. `kv` [blocks, ...] has contiguous blocks. `slab` [host blocks,
    bytes of a block] is uint8, pinned if `kv` is on a GPU. The copy is queued on `stream`, or without one
    behind the current stream, which then waits for it. Returns the event of the copy's end, until which the
    caller keeps both tensors, or None if the copy is done. Raises BlockCopyError."""
    return _copy_rows(kv, block_ids, slab, host_blocks, stream)


def scatter_blocks(
    slab: torch.Tensor,
    host_blocks: Sequence[int],
    kv: torch.Tensor,
    block_ids: Sequence[int],
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Event | None:
    """kv[block_ids[i]] = slab[host_blocks[i]]; otherwise as `gather_blocks`."""
    return _copy_rows(slab, host_blocks, kv, block_ids, stream)


def _copy_rows(
    src: torch.Tensor,
    src_ids: Sequence[int],
    dst: torch.Tensor,
    dst_ids: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> torch.cuda.Event | None:
    from_ids, to_ids = check_ids(src_ids, src.shape[0], dst_ids, dst.shape[0])
    if not len(from_ids):
        return None
    for rows in (src, dst):
        if not rows[0].is_contiguous():
            raise BlockCopyError(
                f"the blocks of a tensor of shape {tuple(rows.shape)} and strides {rows.stride()} are not "
                "contiguous"
            )
    if src[0].nbytes != dst[0].nbytes:
        raise BlockCopyError(
            f"blocks of {src[0].nbytes} bytes do not fit those of {dst[0].nbytes} bytes: the shapes are "
            f"{tuple(src.shape)} of {src.dtype} and {tuple(dst.shape)} of {dst.dtype}"
        )
    devices = [rows.device for rows in (src, dst) if rows.is_cuda]
    if len(set(devices)) == 2:
        raise BlockCopyError(f"a copy from {src.device} to {dst.device} has to go through host memory")
    if devices and not all(rows.is_cuda or rows.is_pinned() for rows in (src, dst)):
        raise BlockCopyError(
            "the host's side of a copy to or from a GPU is not pinned: allocate it with pin_memory=True"
        )
    pieces = join(
        np.array([src.data_ptr()]),
        np.array([dst.data_ptr()]),
        src.stride(0) * src.element_size(),
        dst.stride(0) * dst.element_size(),
        [],
        src[0].nbytes,
    )
    if not devices:
        copy_on_host(pieces, from_ids, to_ids)
        return None
    return copy_on_device(pieces, from_ids, to_ids, devices[0], stream, len(devices) == 1)


def check_ids(src_ids: Ids, num_src: int, dst_ids: Ids, num_dst: int) -> tuple[np.ndarray, np.ndarray]:
    """Both as int64. A source may come twice, a destination may not. Raises BlockCopyError."""
    if len(src_ids) != len(dst_ids):
        raise BlockCopyError(
            f"{len(src_ids)} source blocks and {len(dst_ids)} destination blocks: the lists go pairwise"
        )
    from_ids, to_ids = _integers("source", src_ids), _integers("destination", dst_ids)
    for what, ids, count in (("source", from_ids, num_src), ("destination", to_ids, num_dst)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            wrong = ids[(ids < 0) | (ids >= count)][0]
            raise BlockCopyError(f"{what} block {wrong} does not exist: ids go from 0 to {count - 1}")
    if len(set(to_ids.tolist())) < len(to_ids):
        twice = np.flatnonzero(np.bincount(to_ids) > 1)[0]
        raise BlockCopyError(f"destination block {twice} is named more than once: which copy would stay?")
    return from_ids, to_ids


def _integers(what: str, ids: Ids) -> np.ndarray:
    array = np.asarray(ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise BlockCopyError(f"{what} blocks {ids!s:.100} are no list of integers")
    return array.astype(np.int64, copy=False)


def copy_blocks(
    src: BlockView,
    src_ids: Sequence[int],
    dst: BlockView,
    dst_ids: Sequence[int],
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.Event | None:
    """dst block dst_ids[i] = src block src_ids[i], in all layers; layouts and numbers of blocks may differ.
    Returns the event of the end, or None if it is done. What the device can't reach, plain memory and files,
    passes through pinned memory, and is done when it returns. Raises LayoutError and BlockCopyError."""
    shared_heads([src.spec], [dst.spec])
    return copy_shards([src], src_ids, [dst], dst_ids, stream)


def copy_shards(
    srcs: Sequence[BlockView],
    src_ids: Ids,
    dsts: Sequence[BlockView],
    dst_ids: Ids,
    stream: torch.cuda.Stream | None,
) -> torch.cuda.Event | None:
    """The same blocks of several ranks' caches, whose heads are told apart by their specs; reshard.py checks
    that they cover each other."""
    num_src, num_dst = (min(view.spec.num_blocks for view in views) for views in (srcs, dsts))
    from_ids, to_ids = check_ids(src_ids, num_src, dst_ids, num_dst)
    for src in srcs:
        for dst in dsts:
            check_memory(src, dst, from_ids, to_ids)
    if not len(from_ids):
        return None
    kinds = {srcs[0].storage.kind, dsts[0].storage.kind}
    if not reachable(kinds):
        _copy_staged(srcs, from_ids, dsts, to_ids, stream)
        return None
    event = None
    for pieces in pieces_between(srcs, dsts, range(srcs[0].spec.num_layers)):
        if Kind.DEVICE in kinds:
            event = copy_on_device(
                pieces, from_ids, to_ids, device_of(srcs[0], dsts[0]), stream, len(kinds) == 2
            )
        else:
            copy_on_host(pieces, from_ids, to_ids)
    if event is not None:
        in_flight.keep(event, *srcs, *dsts)
    return event


def check_memory(src: BlockView, dst: BlockView, src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    """Blocks may be copied within a cache, other blocks onto other blocks; not between other views of the
    same memory."""
    if not dst.mutable:
        raise BlockCopyError("the destination is read-only")
    if src.storage.kind is dst.storage.kind is Kind.DEVICE and src.storage.device != dst.storage.device:
        raise BlockCopyError(
            f"a copy from {src.storage.device} to {dst.storage.device} has to go through host memory"
        )
    if not src.overlaps(dst):
        return
    if (src.spec, src.strides) != (dst.spec, dst.strides) or (src.addresses != dst.addresses).any():
        raise BlockCopyError("source and destination overlap in memory, but are not the same blocks")
    if len(both := np.intersect1d(src_ids, dst_ids)):
        raise BlockCopyError(
            f"block {both[0]} is read and written by one copy within a cache: copy in two steps"
        )


def reachable(kinds: set[Kind]) -> bool:
    """Whether one processor, the device's or the host's, has both at hand."""
    return kinds <= {Kind.DEVICE, Kind.PINNED} or kinds <= {Kind.PINNED, Kind.HOST, Kind.MAPPED}


def device_of(src: BlockView, dst: BlockView) -> torch.device:
    return src.storage.device if src.storage.kind is Kind.DEVICE else dst.storage.device


def pieces_between(
    srcs: Sequence[BlockView], dsts: Sequence[BlockView], layers: Iterable[int]
) -> list[Pieces]:
    """What to copy so that every head of every destination comes from the source that has it. One element,
    unless the shards of a side differ in their strides."""
    spec, which = srcs[0].spec, list(layers)
    item = ITEM_BYTES[spec.dtype]
    src_of = {view.spec.tp_rank: view for view in srcs}
    dst_of = {view.spec.tp_rank: view for view in dsts}
    shares = shared_heads([view.spec for view in srcs], [view.spec for view in dsts])
    heads = shares[0].num_heads
    found: dict[tuple[tuple[int, int], ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for shared in shares:
        src, dst = src_of[shared.src_rank], dst_of[shared.dst_rank]
        strides = tuple((src.strides[axis], dst.strides[axis]) for axis in ("block", "kv", "token", "head"))
        found.setdefault(strides, []).append(
            (
                src.addresses[which] + shared.src_head * src.strides["head"],
                dst.addresses[which] + shared.dst_head * dst.strides["head"],
            )
        )
    pieces = []
    for (block, kv, token, head_strides), starts in found.items():
        src_starts, dst_starts = (np.concatenate(side) for side in zip(*starts))
        dims = [(2, *kv), (spec.block_size, *token), (heads, *head_strides), (spec.head_dim, item, item)]
        pieces.append(join(src_starts, dst_starts, *block, dims, item))
    return pieces


def _copy_staged(
    srcs: Sequence[BlockView],
    src_ids: np.ndarray,
    dsts: Sequence[BlockView],
    dst_ids: np.ndarray,
    stream: torch.cuda.Stream | None,
) -> None:
    """By way of memory that has the layout of the side which can't be reached."""
    kinds = {srcs[0].storage.kind, dsts[0].storage.kind}
    from_source = srcs[0].storage.kind is Kind.DIRECT or dsts[0].storage.kind is Kind.DEVICE
    shards = srcs if from_source else dsts
    block_bytes = sum(shard.spec.block_bytes for shard in shards)
    num_blocks = min(len(src_ids), max(1, STAGING_BYTES // block_bytes))
    allocate = pinned_memory if Kind.DEVICE in kinds else host_memory
    staged = [
        BlockView.over(spec, allocate(spec.num_bytes))
        for spec in (replace(shard.spec, num_blocks=num_blocks) for shard in shards)
    ]
    for start in range(0, len(src_ids), num_blocks):
        from_ids, to_ids = src_ids[start : start + num_blocks], dst_ids[start : start + num_blocks]
        ids = np.arange(len(from_ids))
        if from_source:
            for shard, stage in zip(shards, staged):
                _copy_by_host(shard, from_ids, stage, ids)
            event = copy_shards(staged, ids, dsts, to_ids, stream)
        else:
            event = copy_shards(srcs, from_ids, staged, ids, stream)
        if event is not None:
            event.synchronize()
        if not from_source:
            for shard, stage in zip(shards, staged):
                _copy_by_host(stage, ids, shard, to_ids)


def _copy_by_host(src: BlockView, src_ids: np.ndarray, dst: BlockView, dst_ids: np.ndarray) -> None:
    """Between caches of one spec, one of them host memory, the other host memory or a file."""
    file = src if src.storage.kind is Kind.DIRECT else dst
    storages = [file.layer(i).storage for i in range(file.spec.num_layers)]
    for storage in dict.fromkeys(storages):
        (pieces,) = pieces_between([src], [dst], [i for i, its in enumerate(storages) if its is storage])
        if storage.kind is not Kind.DIRECT:
            copy_on_host(pieces, src_ids, dst_ids)
            continue
        for source, target in zip(*(addresses.tolist() for addresses in runs(pieces, src_ids, dst_ids))):
            if file is src:
                storage.read(source, bytes_at(target, pieces.run).numpy())
            else:
                storage.write(target, bytes_at(source, pieces.run).numpy())


def copy_on_device(
    pieces: Pieces,
    src_ids: np.ndarray,
    dst_ids: np.ndarray,
    device: torch.device,
    stream: torch.cuda.Stream | None,
    over_pcie: bool,
) -> torch.cuda.Event:
    """Queues the copy; the event is that of its end."""
    current = stream or torch.cuda.current_stream(device)
    if stream is None or not stream.cuda_stream:  # the copy engines' batches don't take the default stream
        stream = _side_stream(device)
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        if over_pcie and pieces.run >= DMA_BYTES:
            copy_by_dma(*runs(pieces, src_ids, dst_ids), pieces.run, stream)
        else:
            from shoal.kernels.block_copy_triton import copy_by_kernel  # only now: a CPU run may lack Triton

            packed = upload(device, pieces.src, pieces.dst, src_ids, dst_ids)
            copy_by_kernel(pieces, *packed.split((2 * len(pieces.src), 2 * len(src_ids))))
        event = stream.record_event()
    if current is not stream:
        current.wait_event(event)
    return event


def upload(device: torch.device, *arrays: np.ndarray) -> torch.Tensor:
    """One after the other, int64, behind what the current stream does."""
    return torch.from_numpy(np.concatenate(arrays)).pin_memory().to(device, non_blocking=True)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class CopyStream:
    """A copy staged once and set off layer by layer, so that one layer travels while the next is computed.
    Not for several threads.

        copy.prepare_block_map(src, dst); copy.prepare_block_ids(src_ids, dst_ids) copy.trigger_layer(0,
        after=computed); copy.wait_layer(0, stream)    # in whatever order, each layer as often as one likes

    On a device everything is queued on `stream`, and each layer has its event; on the CPU a layer is copied
    when it is triggered.
    """

    def __init__(self, device: torch.device | str, stream: torch.cuda.Stream | None = None) -> None:
        self.device = torch.device(device)
        self.stream = stream or (torch.cuda.Stream(self.device) if self.device.type == "cuda" else None)
        self._views: tuple[BlockView, BlockView] | None = None
        self._ids: tuple[np.ndarray, np.ndarray] | None = None
        self._maps: list[Pieces] = []  # a layer each; the last: all of them
        self._clear()

    def prepare_block_map(self, src: BlockView, dst: BlockView) -> None:
        """Which caches. Raises BlockCopyError if others are staged (`reset` first) or plain memory meets a
        device, and LayoutError."""
        if self._views is not None:
            raise BlockCopyError("a block map is staged already: reset() first")
        shared_heads([src.spec], [dst.spec])
        check_memory(src, dst, *(np.empty(0, np.int64),) * 2)
        kinds = {src.storage.kind, dst.storage.kind}
        if not reachable(kinds) or (Kind.DEVICE in kinds) != (self.device.type == "cuda"):
            raise BlockCopyError(
                f"a copy stream of {self.device} does not reach from {src.storage.kind} to "
                f"{dst.storage.kind} storage: "
                "copy_blocks goes through memory in between"
            )
        layers = range(src.spec.num_layers)
        self._maps = [pieces_between([src], [dst], which)[0] for which in (*([i] for i in layers), layers)]
        self._over_pcie = len(kinds) == 2
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                packed = upload(
                    self.device, *(part for pieces in self._maps for part in (pieces.src, pieces.dst))
                )
                self._addresses = packed.split([2 * len(pieces.src) for pieces in self._maps])
        self._views = (src, dst)
        self._clear()

    def prepare_block_ids(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Which blocks, from now on; no layer has been triggered then. Raises BlockCopyError."""
        if self._views is None:
            raise BlockCopyError("no block map is staged: prepare_block_map() first")
        src, dst = self._views
        from_ids, to_ids = check_ids(src_ids, src.spec.num_blocks, dst_ids, dst.spec.num_blocks)
        check_memory(src, dst, from_ids, to_ids)
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self._device_ids = upload(self.device, from_ids, to_ids)
        self._ids = (from_ids, to_ids)
        self._clear()

    def trigger_layer(self, layer: int, after: torch.cuda.Event | None = None) -> None:
        """Sets off a layer, behind an event if one is given. Again for the same ids does nothing, until
        `rearm`."""
        self._check(layer)
        if not self._triggered[layer]:
            self._start(layer, [layer], after)

    def trigger_all_layers(self, after: torch.cuda.Event | None = None) -> None:
        """Those that have not been; as one copy if none has."""
        self._check(0)
        if not any(self._triggered):
            self._start(-1, range(len(self._triggered)), after)
        for layer in range(len(self._triggered)):
            self.trigger_layer(layer, after)

    def _start(self, which: int, layers: Iterable[int], after: torch.cuda.Event | None) -> None:
        assert self._ids is not None and self._views is not None
        pieces, event = self._maps[which], None
        if self.stream is None:
            copy_on_host(pieces, *self._ids)
        else:
            if after is not None:
                self.stream.wait_event(after)
            if len(self._ids[0]):
                with torch.cuda.stream(self.stream):
                    if self._over_pcie and pieces.run >= DMA_BYTES:
                        copy_by_dma(*runs(pieces, *self._ids), pieces.run, self.stream)
                    else:
                        from shoal.kernels.block_copy_triton import copy_by_kernel  # only now, as above

                        copy_by_kernel(pieces, self._addresses[which], self._device_ids)
            event = self.stream.record_event()
            in_flight.keep(event, *self._views)
        for layer in layers:
            self._triggered[layer], self._events[layer] = True, event

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Has a stream (default: the current one) wait for a layer, which has been triggered. Nothing to wait
        for on the CPU."""
        self._check(layer)
        if not self._triggered[layer]:
            raise BlockCopyError(
                f"layer {layer} has not been triggered: waiting for it would wait for nothing"
            )
        if (event := self._events[layer]) is not None:
            (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def event(self, layer: int) -> torch.cuda.Event | None:
        """The event of a layer's end; None before the layer is triggered, and on the CPU."""
        self._check(layer)
        return self._events[layer]

    def synchronize(self) -> None:
        """Returns when what was triggered is done."""
        if self.stream is not None:
            self.stream.synchronize()
            in_flight.settle()

    def rearm(self) -> None:
        """The same copy once more: no layer has been triggered."""
        self._check(0)
        self._clear()

    def reset(self) -> None:
        """Forgets caches and blocks; copies in flight go on."""
        self._views = self._ids = None

    def _clear(self) -> None:
        num_layers = max(0, len(self._maps) - 1)
        self._triggered = [False] * num_layers
        self._events: list[torch.cuda.Event | None] = [None] * num_layers

    def _check(self, layer: int) -> None:
        if self._ids is None:
            raise BlockCopyError("nothing is staged: prepare_block_map() and prepare_block_ids() first")
        if not 0 <= layer < len(self._triggered):
            raise BlockCopyError(
                f"layer {layer} does not exist: layers go from 0 to {len(self._triggered) - 1}"
            )


class CopyStreams:
    """A pool of `size` streams. A `CopyStream` that is dropped gives its stream back; whoever has it next is
    queued behind its copies."""

    def __init__(self, device: torch.device | str, size: int) -> None:
        self.device = torch.device(device)
        self._free = [
            torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in range(size)
        ]
        self.size = size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> CopyStream:
        """Raises NoFreeCopyStreamError."""
        try:
            stream = self._free.pop()
        except IndexError:
            raise NoFreeCopyStreamError(
                f"all {self.size} copy streams are in use: drop one, or make the pool larger"
            ) from None
        copy = CopyStream(self.device, stream)
        weakref.finalize(copy, self._free.append, stream)
        return copy
