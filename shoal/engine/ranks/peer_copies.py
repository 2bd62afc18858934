"""`CudaPeerCopies`: sums over the GPUs of one host for large steps, whose parts copy engines carry to the
other ranks while the SMs multiply. Each rank has all parts in its memory then, and the next norm sums them
(kernels/sum_parts.py).

Each rank has some slots, each with a place for the part of every other rank. The nth piece of rows that is
summed goes into slot n modulo their number on every rank. On a stream of its own a rank waits until the
others have read what was in the slot (`read`), copies its part and raises its flag there (`landed`). Before
the norm, the stream of the step waits for the others' flags, and after it raises `read`. The waits are the
streams' own (cuStreamWaitValue32): no kernel waits on an SM, which a matmul that stays on its SMs would keep
away from there. Flags are numbers of pieces and wrap: the driver compares them by their difference.
"""

from __future__ import annotations

import ctypes
import logging
import time
from types import ModuleType

import torch

from shoal.engine.ranks.shared_memory import SharedMemory, all_agree, share_memory
from shoal.kv.cuda_driver import DriverError, call
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, ModelConfig
from shoal.models.registry import BY_NAME

logger = logging.getLogger(__name__)

ALIGNMENT = 128  # All pieces but the last one have a multiple of this number of rows.
RANKS = 2  # With more, each rank would send its part to all others, and NCCL sends less.
SLOTS = 2
PIECE_ROWS = 8192  # most rows of a piece
FEWEST_ROWS = 4096  # A smaller step's sums stay whole: the host would not keep up with two of each.
HEAD_BYTES = 4096  # flags: SLOTS x ranks of `landed`, then as many of `read`
FAR_AHEAD = 1 << 30  # pieces
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
TEST_ROWS = 17, 300
TEST_SECONDS = 20.0


class CopiedSum:
    """One piece of rows whose parts are on their way."""

    def __init__(self, copies: CudaPeerCopies, turn: int, own_TD: torch.Tensor) -> None:
        self.copies, self.turn, self.own_TD = copies, turn, own_TD
        self.sent = torch.cuda.Event()

    def add(self, residual_TD: torch.Tensor) -> None:
        copies = self.copies
        add_parts = _kernels().add_parts
        add_parts(self.own_TD, copies.landed(self), copies.rank, residual_TD)
        copies.has_read(self)

    def add_rms_norm(self, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        copies, sum_and_norm = self.copies, _kernels().add_parts_rms_norm
        normed_TD = sum_and_norm(self.own_TD, copies.landed(self), copies.rank, residual_TD, weight_D, eps)
        copies.has_read(self)
        return normed_TD


class CudaPeerCopies:
    """This rank's slots and the others', mapped here. Use `connect`."""

    def __init__(self, rank: int, memory: SharedMemory, hidden_size: int, dtype: torch.dtype) -> None:
        self.rank, self.memory, self.hidden_size, self.dtype = rank, memory, hidden_size, dtype
        self.size, self.turns = len(memory.addresses), 0
        self.part_bytes = PIECE_ROWS * hidden_size * dtype.itemsize
        device = memory.own.device
        self._stream, self._releasing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._flags = torch.zeros(HEAD_BYTES // 4, dtype=torch.int32).pin_memory()
        self._others = [other for other in range(self.size) if other != rank]

    def pieces(self, num_rows: int) -> list[slice]:
        # Turns are counted on the host, which a graph would not do again.
        if not FEWEST_ROWS <= num_rows <= SLOTS * PIECE_ROWS or torch.cuda.is_current_stream_capturing():
            return []
        count = max(2, -(-num_rows // PIECE_ROWS))
        size = -(-num_rows // (count * ALIGNMENT)) * ALIGNMENT
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]

    def begin(self, part_TD: torch.Tensor) -> CopiedSum:
        """Sends this rank's part to the others, when the current stream has made it."""
        assert part_TD.is_contiguous() and part_TD.nbytes <= self.part_bytes
        self.turns += 1
        piece, slot = CopiedSum(self, self.turns, part_TD), self.turns % SLOTS
        self._stream.wait_stream(torch.cuda.current_stream())
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        for other in self._others:
            self._wait(stream, SLOTS + slot, other, piece.turn - SLOTS)
            there = self.memory.addresses[other] + self._start(slot, self.rank, other)
            source, size = ctypes.c_uint64(part_TD.data_ptr()), ctypes.c_size_t(part_TD.nbytes)
            call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(there), source, size, stream)
            self._raise(stream, slot, other, piece.turn)
        piece.sent.record(self._stream)
        return piece

    def landed(self, piece: CopiedSum) -> torch.Tensor:
        """Returns the others' parts, [R - 1, T, D], for which the current stream waits; and until this
        rank's own part has been sent, as its memory may have another use then."""
        current, slot = torch.cuda.current_stream(), piece.turn % SLOTS
        current.wait_event(piece.sent)
        for other in self._others:
            self._wait(ctypes.c_void_p(current.cuda_stream), slot, other, piece.turn)
        start, others = HEAD_BYTES + slot * (self.size - 1) * self.part_bytes, self.size - 1
        parts = self.memory.own[start : start + others * self.part_bytes].view(self.dtype)
        rows = len(piece.own_TD)
        return parts.view(others, -1)[:, : rows * self.hidden_size].unflatten(1, (rows, self.hidden_size))

    def has_read(self, piece: CopiedSum) -> None:
        """The current stream tells the others that it has read their parts."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for other in self._others:
            self._raise(stream, SLOTS + piece.turn % SLOTS, other, piece.turn)

    def release(self) -> None:
        """Ends all waits for other ranks. Any thread may call it, while streams wait."""
        with torch.inference_mode(), torch.cuda.stream(self._releasing):
            self._flags.fill_(_signed(self.turns + FAR_AHEAD))
            self.memory.own[:HEAD_BYTES].view(torch.int32).copy_(self._flags, non_blocking=True)

    def close(self) -> None:
        """Gives the memory back. No copy may use it any more, on any rank."""
        self.memory.close()

    def _start(self, slot: int, rank: int, owner: int) -> int:
        """Returns where the part of `rank` lies in the memory of `owner`."""
        place = rank - (rank > owner)
        return HEAD_BYTES + (slot * (self.size - 1) + place) * self.part_bytes

    def _wait(self, stream: ctypes.c_void_p, number: int, other: int, turn: int) -> None:
        address = ctypes.c_uint64(self.memory.addresses[self.rank] + 4 * (number * self.size + other))
        value = ctypes.c_uint32(turn & 0xFFFFFFFF)
        call("cuStreamWaitValue32_v2", stream, address, value, ctypes.c_uint(AT_LEAST))

    def _raise(self, stream: ctypes.c_void_p, number: int, other: int, turn: int) -> None:
        address = ctypes.c_uint64(self.memory.addresses[other] + 4 * (number * self.size + self.rank))
        value = ctypes.c_uint32(turn & 0xFFFFFFFF)
        call("cuStreamWriteValue32_v2", stream, address, value, ctypes.c_uint(0))


def _kernels() -> ModuleType:
    """kernels/sum_parts.py. It imports Triton, which a machine without a GPU does without."""
    from shoal.kernels import sum_parts

    return sum_parts


def _signed(turn: int) -> int:
    return (turn + (1 << 31)) % (1 << 32) - (1 << 31)


def takes_model(config: ModelConfig, num_ranks: int) -> bool:
    """Returns True if the model has layers that sum in pieces (models/decoder_layers/ranks_layer.py). For
    others the slots would be memory without a use."""
    plain = BY_NAME[config.architecture].layer_class is None
    return (
        num_ranks == RANKS
        and plain
        and any(
            isinstance(kind.mixer, AttentionKind) and kind.mixer.gate is None and kind.experts is None
            for kind in config.layers
        )
    )


def connect(tp: TensorParallel, hidden_size: int, dtype: torch.dtype) -> CudaPeerCopies | None:
    """Makes the large sums of all ranks, which call this together. None, with a line in rank 0's log, where
    they are not right: NCCL then makes large sums too."""
    num_bytes = HEAD_BYTES + SLOTS * (tp.size - 1) * PIECE_ROWS * hidden_size * dtype.itemsize
    memory, why = share_memory(tp, num_bytes)
    if memory is None:
        if tp.rank == 0:
            logger.warning("large sums over GPUs go by NCCL: %s", why)
        return None
    copies = CudaPeerCopies(tp.rank, memory, hidden_size, dtype)
    # Every rank makes all sums, also after a wrong one, as the others take part in them.
    is_right = all([_is_right(tp, copies, rows) for rows in TEST_ROWS * SLOTS])
    if all_agree(tp, is_right):
        return copies
    tp.barrier()
    copies.close()
    if tp.rank == 0:
        logger.warning("large sums over GPUs go by NCCL: sums by copies differ from NCCL's")
    return None


def _is_right(tp: TensorParallel, copies: CudaPeerCopies, rows: int) -> bool:
    """Compares one sum with NCCL's. Small whole numbers have the same sum in any order."""
    generator = torch.Generator(tp.device).manual_seed(tp.rank + rows)
    shape = rows, copies.hidden_size
    part = torch.randint(-8, 9, shape, generator=generator, device=tp.device).to(copies.dtype)
    expected, residual = 2 * tp.all_reduce(part.clone()) + 1, torch.ones_like(part)
    try:
        copies.begin(part).add(residual)
        copies.begin(part).add_rms_norm(residual, torch.ones_like(part[0]), 1e-6)
    except DriverError as error:  # a driver without waits of streams
        logger.warning("rank %d: %s", tp.rank, error)
        return False
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + TEST_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            copies.release()
            return False
        time.sleep(1e-4)
    return torch.equal(residual, expected)
