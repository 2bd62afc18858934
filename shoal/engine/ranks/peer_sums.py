"""`CudaPeerSums`: small all-reduces over the GPUs of one host, in memory that the ranks map by CUDA IPC.
kernels/all_reduce.py has the kernels; where they do not work, layers/parallel.py uses NCCL alone.

The kernels are used only after they have given the sums of NCCL on all ranks; until then their waits have an
end.
"""

from __future__ import annotations

import dataclasses
import logging
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from shoal.engine.ranks.peer_copies import CudaPeerCopies
from shoal.engine.ranks.shared_memory import SharedMemory, all_agree, share_memory
from shoal.kernels.reference import rms_norm
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

    def __init__(self, peers: Peers, memory: SharedMemory) -> None:
        self.peers, self._memory = peers, memory
        self.large: CudaPeerCopies | None = None  # released and closed with these sums
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
        if self.large is not None:
            self.large.release()

    def close(self) -> None:
        """Gives the memory back. No kernel may use it any more, on any rank."""
        self._memory.close()
        if self.large is not None:
            self.large.close()


def connect(tp: TensorParallel, hidden_size: int, dtype: torch.dtype) -> CudaPeerSums | None:
    """Makes all ranks' sums, which every rank calls together. None, with a line in rank 0's log, where they
    can't be had or are not right: NCCL then makes all sums."""
    kernels = _kernels()
    if tp.size > kernels.MAX_RANKS:
        why: str | None = f"there are {tp.size} ranks, and the kernels are for at most {kernels.MAX_RANKS}"
    else:
        block_bytes = max(hidden_size, kernels.PLAIN_BLOCK) * dtype.itemsize
        memory, why = share_memory(tp, kernels.buffer_bytes(block_bytes, tp.size))
        if memory is not None:
            addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=tp.device)
            peers = kernels.Peers(tp.rank, tp.size, addresses, memory.own, block_bytes, TEST_POLLS)
            why = _difference(tp, peers, hidden_size, dtype)
            if all_agree(tp, why is None):
                if tp.rank == 0:
                    logger.info(
                        "sums of up to %d tokens go over the GPUs' own memory, by %d ranks",
                        kernels.MAX_BLOCKS,
                        tp.size,
                    )
                return CudaPeerSums(dataclasses.replace(peers, most_polls=kernels.FOR_EVER), memory)
            why = why or "on another rank the kernels' sums differ from NCCL's"
            tp.barrier()  # until here others may write into this rank's memory
            memory.close()
    if tp.rank == 0:
        logger.warning("all sums over GPUs go by NCCL: %s", why)
    return None


def _difference(tp: TensorParallel, peers: Peers, hidden_size: int, dtype: torch.dtype) -> str | None:
    """Returns the sums or norms that are wrong on this rank. None: none is. All ranks call this together."""
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
