"""BlockMap: which bytes of one cache become which bytes of another. It is made once for a direction and holds
for any blocks of the two caches. copy.py carries copies out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from shoal.errors import UserError
from shoal.kernels.copy.block_copy import Pieces, join
from shoal.kv.layout import ITEM_BYTES, LayoutError, SharedHeads, shared_heads
from shoal.kv.storage import Kind
from shoal.kv.view import BlockView

# Runs of this many bytes and more go between two memories by the copy engines, shorter ones by a kernel: over
# PCIe a descriptor costs what 64 KiB cost.
DMA_BYTES = 256 << 10
Ids = Sequence[int] | np.ndarray
Shards = BlockView | Sequence[BlockView]  # a cache, or some ranks of one


class BlockCopyError(UserError):
    """Ids, shapes or memories that do not go together."""


class BlockMap:
    """From `srcs` to `dsts`: every head of every destination comes from a source that has it. Layouts,
    tensor-parallel sizes and numbers of blocks may differ; all shards of a side have the same numbers.

    Raises LayoutError if blocks of one side can't become blocks of the other, and BlockCopyError if no
    processor, a device or the host, can access both sides.
    """

    def __init__(self, srcs: Shards, dsts: Shards) -> None:
        self.srcs, self.dsts = as_shards(srcs), as_shards(dsts)
        shares = shared_heads([view.spec for view in self.srcs], [view.spec for view in self.dsts])
        self._is_one_cache = check_memory(self.srcs, self.dsts)
        if not reachable(self.srcs, self.dsts):
            raise BlockCopyError(
                f"no processor reaches from {_place(self.srcs[0])} to {_place(self.dsts[0])}: copy_blocks "
                "goes through memory in between"
            )
        self.devices = devices_of(self.srcs, self.dsts)
        self.num_layers = self.srcs[0].spec.num_layers
        layers = range(self.num_layers)
        # One element for each layer, and a last one for all of them.
        self.pieces = [pieces_between(self.srcs, self.dsts, shares, [layer]) for layer in layers]
        self.pieces.append(pieces_between(self.srcs, self.dsts, shares, layers))
        kinds = {self.srcs[0].storage.kind, self.dsts[0].storage.kind}
        self._crosses = len(kinds) == 2 or len(self.devices) > 1 or self.srcs[0].storage.is_far
        self._addresses: dict[torch.device, list[list[torch.Tensor]]] = {}

    def check_ids(self, src_ids: Ids, dst_ids: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Both as int64. Block dst_ids[i] is to become block src_ids[i]: a source may come twice, a
        destination may not. Raises BlockCopyError."""
        ids = check_ids(src_ids, self.srcs, dst_ids, self.dsts)
        if self._is_one_cache:
            check_apart(*ids)
        return ids

    def goes_by_dma(self, pieces: Pieces) -> bool:
        """Says if the copy engines copy these pieces, rather than a kernel."""
        return self._crosses and pieces.run >= DMA_BYTES

    def addresses(self, device: torch.device) -> list[list[torch.Tensor]]:
        """The addresses of `pieces`, as a kernel on the device takes them: int64 [2 * pieces] each."""
        if device not in self._addresses:
            every = [part for one in self.pieces for pieces in one for part in (pieces.src, pieces.dst)]
            # The upload has a stream of its own, so that it waits for nothing that the device does. It ends
            # here, so that copies on any stream may use it.
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                joined = torch.from_numpy(np.concatenate(every)).to(device)
            stream.synchronize()
            tables = iter(joined.split([2 * len(pieces.src) for one in self.pieces for pieces in one]))
            self._addresses[device] = [[next(tables) for _ in one] for one in self.pieces]
        return self._addresses[device]


def as_shards(views: Shards) -> list[BlockView]:
    """Raises LayoutError if they are in different kinds of storage, or on devices that do not reach each
    other."""
    shards = [views] if isinstance(views, BlockView) else list(views)
    for view in shards[1:]:
        if view.storage.kind is not shards[0].storage.kind or not _are_peers(devices_of([shards[0]], [view])):
            raise LayoutError(
                f"the shards of one side are in {_place(shards[0])} and {_place(view)}: it takes one kind, "
                "and devices that reach each other"
            )
    return shards


def check_ids(
    src_ids: Ids, srcs: Sequence[BlockView], dst_ids: Ids, dsts: Sequence[BlockView]
) -> tuple[np.ndarray, np.ndarray]:
    """As BlockMap.check_ids, but for blocks that one copy within a cache reads and writes."""
    if len(src_ids) != len(dst_ids):
        raise BlockCopyError(
            f"{len(src_ids)} source blocks and {len(dst_ids)} destination blocks: the lists go pairwise"
        )
    from_ids = _integers("source", src_ids, min(view.spec.num_blocks for view in srcs))
    to_ids = _integers("destination", dst_ids, min(view.spec.num_blocks for view in dsts))
    if len(set(to_ids.tolist())) < len(to_ids):
        twice = np.flatnonzero(np.bincount(to_ids) > 1)[0]
        raise BlockCopyError(f"destination block {twice} is named more than once: which copy would stay?")
    return from_ids, to_ids


def _integers(what: str, ids: Ids, num_blocks: int) -> np.ndarray:
    array = np.asarray(ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise BlockCopyError(f"{what} blocks {ids!s:.100} must be a list of integers")
    if array.size and not 0 <= array.min() <= array.max() < num_blocks:
        wrong = array[(array < 0) | (array >= num_blocks)][0]
        raise BlockCopyError(f"{what} block {wrong} does not exist: ids go from 0 to {num_blocks - 1}")
    return array.astype(np.int64, copy=False)


def check_memory(srcs: Sequence[BlockView], dsts: Sequence[BlockView]) -> bool:
    """Says if a source and a destination are one cache, within which blocks may be copied onto other blocks.
    Raises BlockCopyError if they are other views of the same memory, or if a destination is read-only."""
    is_one_cache = False
    for dst in dsts:
        if not dst.mutable:
            raise BlockCopyError("the destination is read-only")
        for src in srcs:
            if not src.overlaps(dst):
                continue
            if src.spec != dst.spec or src.strides != dst.strides or (src.addresses != dst.addresses).any():
                raise BlockCopyError("source and destination overlap in memory, but are not the same blocks")
            is_one_cache = True
    return is_one_cache


def check_apart(src_ids: np.ndarray, dst_ids: np.ndarray) -> None:
    if len(both := np.intersect1d(src_ids, dst_ids)):
        raise BlockCopyError(
            f"block {both[0]} is read and written by one copy within a cache: copy in two steps"
        )


def devices_of(srcs: Sequence[BlockView], dsts: Sequence[BlockView]) -> list[torch.device]:
    """Returns the devices of both sides, the destinations' first."""
    views = [view for view in (*dsts, *srcs) if view.storage.kind is Kind.DEVICE]
    return list(dict.fromkeys(view.storage.device for view in views))


def reachable(srcs: Sequence[BlockView], dsts: Sequence[BlockView]) -> bool:
    """Says if one processor, a device or the host, can access both sides. Enables peer access between devices
    where it is possible."""
    kinds = {srcs[0].storage.kind, dsts[0].storage.kind}
    if Kind.DEVICE not in kinds:
        return kinds <= {Kind.PINNED, Kind.HOST, Kind.MAPPED}
    return kinds <= {Kind.DEVICE, Kind.PINNED} and _are_peers(devices_of(srcs, dsts))


def _are_peers(devices: Sequence[torch.device]) -> bool:
    return all(_become_peers(*pair) for pair in itertools.combinations(devices, 2))


@functools.cache
def _become_peers(device: torch.device, other: torch.device) -> bool:
    """Lets each device reach the other's memory. Returns False if they can't."""
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    here, there = torch.zeros(1, device=device), torch.zeros(1, device=other)
    # torch lets a device reach another one when it first copies from it to the other one.
    there.copy_(here)
    here.copy_(there)
    return True


def pieces_between(
    srcs: Sequence[BlockView], dsts: Sequence[BlockView], shares: Sequence[SharedHeads], layers: Sequence[int]
) -> list[Pieces]:
    """Returns the pieces to copy for these layers; `shares` says which heads go where. There is one element,
    unless the shards of a side differ in their strides."""
    spec, heads, which = srcs[0].spec, shares[0].num_heads, list(layers)
    item = ITEM_BYTES[spec.dtype]
    src_of = {view.spec.tp_rank: view for view in srcs}
    dst_of = {view.spec.tp_rank: view for view in dsts}
    found: dict[tuple[tuple[int, int], ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for shared in shares:
        src, dst = src_of[shared.src_rank], dst_of[shared.dst_rank]
        strides = tuple((src.strides[axis], dst.strides[axis]) for axis in ("block", "kv", "token", "head"))
        from_starts = src.addresses[which] + shared.src_head * src.strides["head"]
        to_starts = dst.addresses[which] + shared.dst_head * dst.strides["head"]
        found.setdefault(strides, []).append((from_starts, to_starts))
    pieces = []
    for (block, kv, token, head), starts in found.items():
        src_starts, dst_starts = (np.concatenate(side) for side in zip(*starts))
        dims = [(spec.planes, *kv), (spec.block_size, *token), (heads, *head), (spec.head_dim, item, item)]
        pieces.append(join(src_starts, dst_starts, *block, dims, item))
    return pieces


def _place(view: BlockView) -> str:
    return f"{view.storage.kind} storage on {view.storage.device}"
