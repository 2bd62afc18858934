"""`StateInbox`: snapshots of recurrent states that come from a worker of another tensor-parallel size. Ranks
of each size have other heads of a state and other channels of a convolution, in rows of other lengths. So a
rank reads the whole rows of the other worker's ranks that have its heads, and makes its own row of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec.structs import replace

from shoal.kv.layout import CacheSpec, opaque_spec, shared_heads
from shoal.kv.storage import Storage, device_memory, host_memory
from shoal.kv.view import BlockView


class HeadRun(NamedTuple):
    """Heads side by side in a row: of a state, or of one input of a convolution, with their channels."""

    start: int  # in bytes of the row
    num_heads: int  # in the whole model; ranks share them as they share KV heads
    head_bytes: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row of each rank of a worker, and the KV blocks that a snapshot of it takes."""

    runs: tuple[HeadRun, ...]
    num_blocks: int
    block_bytes: int
    tp_size: int

    def parts(self, tp_rank: int, tp_size: int, num_blocks: int) -> CacheSpec:
        """Describes KV blocks with parts of snapshots, as a group in addition to the layers'. A block's heads
        are whole blocks, one of each rank of this worker, and a rank of `tp_size` needs some of them."""
        spec = opaque_spec(self.block_bytes, num_blocks)
        return replace(spec, num_heads=self.tp_size, tp_rank=tp_rank, tp_size=tp_size)


class _Move(NamedTuple):
    src_row: int  # among those that were read
    src_start: int
    dst_start: int
    num_bytes: int


class StateInbox:
    """Has room for one snapshot of the other worker. `view`: its parts, as transports write them. A reader
    holds `lock` until `unpack` has returned."""

    def __init__(self, theirs: RowLayout, own: RowLayout, into: BlockView) -> None:
        """`into`: the cache of this rank. Raises LayoutError if the ranks of one size can't be made of the
        other's, NotEnoughMemoryError and torch.OutOfMemoryError."""
        rank, self._into = into.spec.tp_rank, into
        spec = theirs.parts(rank, own.tp_size, theirs.num_blocks)
        self._moves = _moves(theirs, own, rank, range(spec.first_head, spec.first_head + spec.heads))
        device = into.storage.device
        on_device = device.type == "cuda"
        self._memory: Storage = (
            device_memory(spec.num_bytes, device) if on_device else host_memory(spec.num_bytes)
        )
        self._stream = torch.cuda.Stream(device) if on_device else None
        self._own = own
        self.view = BlockView.over(spec, self._memory)
        self.lock = threading.Lock()

    def unpack(self, blocks: Sequence[int]) -> None:
        """Writes this rank's snapshot to its KV blocks, and returns when that is done."""
        with torch.cuda.stream(self._stream):
            parts = self._memory.tensor().view(self.view.spec.num_blocks, self.view.spec.heads, -1)
            theirs = parts.transpose(0, 1).flatten(1)
            row = theirs.new_zeros(self._own.num_blocks * self._own.block_bytes)
            for move in self._moves:
                source = theirs[move.src_row, move.src_start : move.src_start + move.num_bytes]
                row[move.dst_start : move.dst_start + move.num_bytes] = source
            own = row.view(self._own.num_blocks, -1)
            cache = self._into.storage.tensor().view(-1, self._own.block_bytes)
            cache[torch.tensor(blocks, device=cache.device)] = own
        if self._stream is not None:
            self._stream.synchronize()


def _moves(theirs: RowLayout, own: RowLayout, rank: int, src_ranks: Sequence[int]) -> list[_Move]:
    """Returns which bytes of the rows of `src_ranks` make the row of `rank`. Raises LayoutError."""
    found = []
    for src, dst in zip(theirs.runs, own.runs, strict=True):
        heads = replace(opaque_spec(dst.head_bytes, 1), num_heads=dst.num_heads)
        srcs = [replace(heads, tp_rank=src_rank, tp_size=theirs.tp_size) for src_rank in src_ranks]
        for share in shared_heads(srcs, [replace(heads, tp_rank=rank, tp_size=own.tp_size)]):
            found.append(
                _Move(
                    src_ranks.index(share.src_rank),
                    src.start + share.src_head * src.head_bytes,
                    dst.start + share.dst_head * dst.head_bytes,
                    share.num_heads * dst.head_bytes,
                )
            )
    return found
