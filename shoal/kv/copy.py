"""Copies of KV blocks, named by lists of ids: from any storage to any storage, between any layouts.

On a device a copy is queued on a stream and told by an event; between host memories it is done when the call returns. A caller that
overwrites a block first waits for the event; a stream waits for nothing by itself: `stream.wait_stream(compute)` comes before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from shoal.errors import UserError
from shoal.kernels.block_copy import Pieces, copy_by_dma, copy_by_kernel, copy_on_host, join, runs

# Runs of this many bytes and more cross PCIe by the copy engines, shorter ones by a kernel: a descriptor costs what 64 KiB cost.
DMA_BYTES = 256 << 10


class BlockCopyError(UserError):
    """Ids, shapes or memories that do not go together."""


def gather_blocks(kv: torch.Tensor, block_ids: Sequence[int], slab: torch.Tensor, slots: Sequence[int],
                  stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
    """slab[slots[i]] = kv[block_ids[i]]. `kv` [blocks, ...] has contiguous blocks; `slab` [slots, bytes of a block] is uint8, pinned where
    `kv` is on a GPU. Queued on `stream` (default: behind the current stream, which waits for it). Returns the event of its end, or None
    if it is done. Raises BlockCopyError."""
    return _copy_rows(kv, block_ids, slab, slots, stream)


def scatter_blocks(slab: torch.Tensor, slots: Sequence[int], kv: torch.Tensor, block_ids: Sequence[int],
                   stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
    """kv[block_ids[i]] = slab[slots[i]]; else as `gather_blocks`."""
    return _copy_rows(slab, slots, kv, block_ids, stream)


def _copy_rows(src: torch.Tensor, src_ids: Sequence[int], dst: torch.Tensor, dst_ids: Sequence[int],
               stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    from_ids, to_ids = check_ids(src_ids, src.shape[0], dst_ids, dst.shape[0])
    if not len(from_ids):
        return None
    for rows in (src, dst):
        if not rows[0].is_contiguous():
            raise BlockCopyError(f"the blocks of a tensor of shape {tuple(rows.shape)} and strides {rows.stride()} are not contiguous")
    if src[0].nbytes != dst[0].nbytes:
        raise BlockCopyError(f"blocks of {src[0].nbytes} bytes do not fit those of {dst[0].nbytes} bytes: the shapes are "
                             f"{tuple(src.shape)} of {src.dtype} and {tuple(dst.shape)} of {dst.dtype}")
    devices = [rows.device for rows in (src, dst) if rows.is_cuda]
    if devices and not all(rows.is_cuda or rows.is_pinned() for rows in (src, dst)):
        raise BlockCopyError("the host's side of a copy to or from a GPU is not pinned: allocate it with pin_memory=True")
    pieces = join([src.data_ptr()], [dst.data_ptr()], src.stride(0) * src.element_size(), dst.stride(0) * dst.element_size(), [],
                  src[0].nbytes)
    if not devices:
        copy_on_host(pieces, from_ids, to_ids)
        return None
    return copy_on_device(pieces, from_ids, to_ids, devices[0], stream, len(devices) == 1)


def check_ids(src_ids: Sequence[int], num_src: int, dst_ids: Sequence[int], num_dst: int) -> tuple[np.ndarray, np.ndarray]:
    """Both as int64. A source may come twice, a destination may not. Raises BlockCopyError."""
    if len(src_ids) != len(dst_ids):
        raise BlockCopyError(f"{len(src_ids)} source blocks and {len(dst_ids)} destination blocks: the lists go pairwise")
    from_ids, to_ids = np.asarray(src_ids, np.int64), np.asarray(dst_ids, np.int64)
    for what, ids, count in (("source", from_ids, num_src), ("destination", to_ids, num_dst)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            wrong = ids[(ids < 0) | (ids >= count)][0]
            raise BlockCopyError(f"{what} block {wrong} does not exist: ids go from 0 to {count - 1}")
    if len(set(to_ids.tolist())) < len(to_ids):
        twice = np.flatnonzero(np.bincount(to_ids) > 1)[0]
        raise BlockCopyError(f"destination block {twice} is named more than once: which copy would stay?")
    return from_ids, to_ids


def copy_on_device(pieces: Pieces, src_ids: np.ndarray, dst_ids: np.ndarray, device: torch.device, stream: torch.cuda.Stream | None,
                   over_pcie: bool) -> torch.cuda.Event:
    """Queues the copy; the event is that of its end. Without a stream of its own it is one operation of the current stream."""
    event = torch.cuda.Event()
    if stream is None or not stream.cuda_stream:    # the copy engines' batches don't take the default stream
        current, stream = stream or torch.cuda.current_stream(device), _side_stream(device)
        stream.wait_stream(current)
    else:
        current = stream
    if over_pcie and pieces.run >= DMA_BYTES:
        copy_by_dma(*runs(pieces, src_ids, dst_ids), pieces.run, stream)
        event.record(stream)
    else:
        with torch.cuda.stream(stream):
            packed = torch.from_numpy(np.concatenate((pieces.src, pieces.dst, src_ids, dst_ids))).pin_memory()
            addresses, ids = packed.to(device, non_blocking=True).split((2 * len(pieces.src), 2 * len(src_ids)))
            copy_by_kernel(pieces, addresses.view(2, -1), *ids.view(2, -1))
            event.record()
    if current is not stream:
        current.wait_event(event)
    return event


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
