"""`CudaPeerSums`: small all-reduces over the GPUs of one host, in memory that the ranks map by CUDA IPC.
kernels/all_reduce.py has the kernels; where they do not work, layers/parallel.py uses NCCL alone.

Each rank allocates a buffer with cudaMalloc, as torch's allocator may use memory that can't be shared, and
maps the others' by CUDA IPC. The kernels are used only after they have given the sums of NCCL on all ranks;
until then their waits have an end.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from shoal.kernels.reference import rms_norm
from shoal.kv.cuda_driver import DriverError, call, close_memory, context, export_memory, open_memory
from shoal.layers.parallel import TensorParallel

if TYPE_CHECKING:
    from shoal.kernels.all_reduce import Peers

logger = logging.getLogger(__name__)

TEST_POLLS = 1 << 22  # some seconds
TEST_ROWS = 1, 3, 17, 96, 256


def _kernels() -> ModuleType:
    """kernels/all_reduce.py. It imports Triton, which a machine without a GPU does without."""
    from shoal.kernels import all_reduce

    return all_reduce


class CudaPeerSums:
    """Use `connect`."""

    def __init__(self, peers: Peers, peer_memory: Sequence[int], address: int) -> None:
        self.peers = peers
        self._peer_memory, self._address = list(peer_memory), address
        self._side = torch.cuda.Stream(peers.own.device)
        sizes = _kernels().COUNTER_INTS, _kernels().FLAG_INTS
        self._releasing = [torch.zeros(size, dtype=torch.int32).pin_memory() for size in sizes]

    def takes(self, x: torch.Tensor) -> bool:
        return self.peers.takes_plain(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _kernels().all_reduce(self.peers, x)

    def takes_rows(self, x_TD: torch.Tensor) -> bool:
        return self.peers.takes(len(x_TD), x_TD.shape[1] * x_TD.itemsize)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return _kernels().all_reduce_add_rms_norm(self.peers, x_TD, residual_TD, weight_D, eps)

    def release(self) -> None:
        """Ends all waits for other ranks. Any thread may call it, while kernels wait."""
        with torch.inference_mode(), torch.cuda.stream(self._side):
            self.peers.release_waits(*self._releasing)

    def close(self) -> None:
        """Gives the memory back. No kernel may use it any more, on any rank."""
        _free(self.peers.own.device.index, self._peer_memory, self._address)


def connect(tp: TensorParallel, hidden_size: int, dtype: torch.dtype) -> CudaPeerSums | None:
    """Makes all ranks' sums, which every rank calls together. None, with a line in rank 0's log, where they
    can't be had or are not right: NCCL then makes all sums."""
    device, sums, why = tp.device.index, None, _hindrance(tp)
    address, peer_memory = 0, []
    if _all_agree(tp, why is None):
        kernels = _kernels()
        block_bytes = max(hidden_size, kernels.PLAIN_BLOCK) * dtype.itemsize
        num_bytes = kernels.buffer_bytes(block_bytes, tp.size)
        handle = bytes(64)
        try:
            address = _allocate(device, num_bytes)
            handle = export_memory(device, address)
        except DriverError as error:
            why = str(error)
        # The others' zeros are written when their handles are here.
        handles = tp.all_gather(torch.tensor([list(handle)], dtype=torch.uint8, device=tp.device), dim=0)
        if _all_agree(tp, why is None):
            try:
                for rank, theirs in enumerate(handles.tolist()):
                    peer_memory.append(0 if rank == tp.rank else open_memory(device, bytes(theirs)))
            except DriverError as error:
                why = str(error)
            if _all_agree(tp, why is None):
                addresses = [at or address for at in peer_memory]
                peers = kernels.Peers(
                    tp.rank,
                    tp.size,
                    torch.tensor(addresses, dtype=torch.int64, device=tp.device),
                    torch.as_tensor(_Bytes(address, num_bytes), device=tp.device),
                    block_bytes,
                    TEST_POLLS,
                )
                why = _difference(tp, peers, hidden_size, dtype)
                if _all_agree(tp, why is None):
                    peers = dataclasses.replace(peers, most_polls=kernels.FOR_EVER)
                    sums = CudaPeerSums(peers, peer_memory, address)
                else:
                    why = why or "on another rank the kernels' sums differ from NCCL's"
    if sums is None:
        tp.barrier()  # until here others may write into this rank's memory
        _free(device, peer_memory, address)
        if tp.rank == 0:
            logger.warning("all sums over GPUs go by NCCL: %s", why or "another rank has no way to its peers")
    elif tp.rank == 0:
        logger.info(
            "sums of up to %d tokens go over the GPUs' own memory, by %d ranks",
            _kernels().MAX_BLOCKS,
            tp.size,
        )
    return sums


def _hindrance(tp: TensorParallel) -> str | None:
    if tp.size > (most := _kernels().MAX_RANKS):
        return f"there are {tp.size} ranks, and the kernels are for at most {most}"
    others = [rank for rank in range(tp.size) if rank != tp.rank]
    far = [rank for rank in others if not torch.cuda.can_device_access_peer(tp.rank, rank)]
    return f"GPU {tp.rank} has no access to the memory of GPU {far[0]}" if far else None


def _all_agree(tp: TensorParallel, is_well: bool) -> bool:
    return int(tp.all_reduce(torch.tensor([int(is_well)], device=tp.device)).item()) == tp.size


def _difference(tp: TensorParallel, peers: Peers, hidden_size: int, dtype: torch.dtype) -> str | None:
    """Which sums or norms are not right on this rank; None if all are. All ranks call this together."""
    kernels = _kernels()
    generator = torch.Generator(tp.device).manual_seed(tp.rank)
    most_rows = kernels.MAX_BLOCKS * kernels.PLAIN_BLOCK // hidden_size  # rows of a sum without a norm
    sizes = sorted({*TEST_ROWS, most_rows} - {0})  # each goes in the way that sums of its size will go
    # At first no kernel waits, as one rank may compile for seconds longer than another.
    for rows in sizes:
        _wrong_sum(tp, dataclasses.replace(peers, most_polls=0), rows, hidden_size, dtype, generator)
    tp.barrier()
    wrong = [
        f"the kernels' {what} of {rows} rows differs from NCCL's"
        for rows in sizes
        for _ in range(3)  # both halves, and the first one again
        if (what := _wrong_sum(tp, peers, rows, hidden_size, dtype, generator))
    ]
    return wrong[0] if wrong else None


def _wrong_sum(
    tp: TensorParallel,
    peers: Peers,
    rows: int,
    hidden_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> str | None:
    """Returns what is wrong after one sum, or None. Small whole numbers have the same sum in any order."""
    kernels, device = _kernels(), tp.device
    x = torch.randint(-8, 9, (rows, hidden_size), generator=generator, device=device).to(dtype)
    expected = tp.all_reduce(x.clone())
    right = {}
    if peers.takes(rows, hidden_size * x.itemsize):
        residual = torch.ones_like(x)
        weight = torch.full((hidden_size,), 2.0, dtype=dtype, device=device)
        normed = kernels.all_reduce_add_rms_norm(peers, x, residual, weight, 1e-6)
        right["sum before a norm"] = torch.equal(residual, expected + 1)
        oracle = rms_norm(expected + 1, weight, 1e-6)
        right["norm"] = torch.allclose(normed.float(), oracle.float(), rtol=2e-2)
    if peers.takes_plain(x):
        right["sum"] = torch.equal(kernels.all_reduce(peers, x), expected)
    return next((what for what, is_right in right.items() if not is_right), None)


class _Bytes:
    """Memory that torch does not own, in the words that it takes from others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": "|u1",
            "shape": (num_bytes,),
        }


def _allocate(device: int, num_bytes: int) -> int:
    """The address of new memory that is all zeros."""
    address = ctypes.c_uint64()
    with context(device):
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        call("cuCtxSynchronize")
    return address.value


def _free(device: int, peer_memory: Sequence[int], address: int) -> None:
    if peer_memory:
        close_memory(device, [at for at in peer_memory if at])
    if address:
        with context(device):
            call("cuMemFree_v2", ctypes.c_uint64(address))
