"""Sums over the GPUs of one host for messages that are too small for NCCL to be quick: each rank writes into
the others' memory, in one kernel, which a graph captures like any other. Alone, or with the residual sum and
RMSNorm that follow.

Each rank has a buffer that all ranks map. `one_shot` writes a rank's whole input to every other rank, and
each sums everything. `two_shot` writes to each rank the shard that it sums, and then the sums to all, which
is less to write for more than two ranks, at the price of a second wait. Sums are made in float32 in the order
of ranks, so that all ranks get the same bits.

A program is on its own: it exchanges a block of the message with the programs of the same number on the other
ranks, in regions of the buffers that are this number's. So it may wait for them whatever else is resident, as
programs start in the order of their numbers, and write before they wait.

How a region is used again. A program counts its turns, in a counter of its own rank. A turn writes into the
region's half of its parity, then raises a flag in each other rank's buffer to the number of the turn
(release, at the system's scope), and waits until the flags of all others in its own buffer have come so far
(acquire). A flag of turn n+1 says that its rank is through with turn n: that was an earlier kernel of the
same stream, and a kernel writes nothing before all earlier ones are done (pdl.py). Every rank has seen those
flags before it goes on to turn n+2, the next one that writes into the half of turn n. So two halves are
enough, nothing is ever reset, and a captured turn may be replayed any number of times. Counters wrap: they
are compared by their difference.

A rank that is gone would leave the others waiting for ever. The process that notices raises this rank's flags
far ahead (`release_waits`), which ends all waits; the results mean nothing then.

T rows · D columns · R ranks. Oracles: torch for the sums, reference.py for the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2

MAX_BLOCKS = 256  # regions of a buffer, and programs of a launch
MAX_RANKS = 8
HALVES = 2
# Bytes of a buffer before its regions: for each block a counter, then a flag for each stage and each rank.
COUNTER_INTS = MAX_BLOCKS
FLAG_INTS = MAX_BLOCKS * 2 * MAX_RANKS
HEAD_BYTES = 4 * (COUNTER_INTS + FLAG_INTS)
PLAIN_BLOCK = 2048  # elements of a block where no norm asks for whole rows
ELEMENTS_PER_THREAD = 8
ALIGNED = 8  # elements: shards begin at multiples of 16 bytes
FAR_AHEAD = 1 << 30  # turns
FOR_EVER = -1

# Messages of fewer bytes than these go in one shot, by the number of ranks. The second wait of two shots
# takes some 4 us, in which a GPU writes 1.2 MB to others; one shot writes R - 1 messages, two shots
# 2 (R - 1) / R.
ONE_SHOT_BYTES = {
    2: 1 << 30,
    3: 900 << 10,
    4: 800 << 10,
    5: 500 << 10,
    6: 380 << 10,
    7: 300 << 10,
    8: 240 << 10,
}

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
C_MAX_BLOCKS, C_MAX_RANKS = tl.constexpr(MAX_BLOCKS), tl.constexpr(MAX_RANKS)
C_HEAD_BYTES, C_COUNTER_INTS = tl.constexpr(HEAD_BYTES), tl.constexpr(COUNTER_INTS)


class Way(Enum):
    ONE_SHOT = 1
    TWO_SHOT = 2


def choose_way(num_bytes: int, ranks: int) -> Way:
    return Way.ONE_SHOT if num_bytes < ONE_SHOT_BYTES[ranks] else Way.TWO_SHOT


def region_bytes(block_bytes: int, ranks: int) -> int:
    """Bytes of one block's region of one stage and half: one block of each rank, or the ranks' shards of
    one."""
    return ranks * -(-block_bytes // 64) * 64


def buffer_bytes(block_bytes: int, ranks: int) -> int:
    """Bytes of a rank's buffer for blocks of at most `block_bytes`."""
    return HEAD_BYTES + HALVES * MAX_BLOCKS * 2 * region_bytes(block_bytes, ranks)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks' buffers as one rank sees them."""

    rank: int
    size: int
    addresses: torch.Tensor  # int64 [R], on the device
    own: torch.Tensor  # uint8: this rank's buffer, which began as zeros
    block_bytes: int  # size of the largest block
    most_polls: int = FOR_EVER  # a wait is abandoned after this number, and the result means nothing

    @property
    def head(self) -> torch.Tensor:
        """Counters, then flags, as int32."""
        return self.own[:HEAD_BYTES].view(torch.int32)

    def takes(self, rows: int, row_bytes: int) -> bool:
        """Says if rows of `row_bytes` bytes can be summed and normed."""
        return 0 < rows <= MAX_BLOCKS and row_bytes <= self.block_bytes

    def takes_plain(self, x: torch.Tensor) -> bool:
        fits = x.is_floating_point() and PLAIN_BLOCK * x.itemsize <= self.block_bytes
        return fits and 0 < x.numel() <= MAX_BLOCKS * PLAIN_BLOCK

    def release_waits(self, counters: torch.Tensor, flags: torch.Tensor) -> None:
        """Ends all waits of this rank, now and for a long time. To be called on another stream.

        It only copies, by way of memory of the host for all counters and for all flags (pinned, if there is a
        GPU) that was allocated before: an allocation on the device, or the first launch of a kernel there,
        may wait for the very kernels that are to be released."""
        counters.copy_(self.head[:COUNTER_INTS])
        flags.copy_(counters.max() + FAR_AHEAD)
        self.head[COUNTER_INTS:].copy_(flags)


@triton.jit
def _flag(address, block, stage: tl.constexpr, rank):
    """Returns the address at which a rank raises its flag of a stage in the buffer at `address`."""
    ints = address.to(tl.pointer_type(tl.int32))
    return ints + C_COUNTER_INTS + (block * 2 + stage) * C_MAX_RANKS + rank


@triton.jit
def _region(address, block, half, stage: tl.constexpr, REGION: tl.constexpr, DTYPE: tl.constexpr):
    """The first element of a region."""
    start = C_HEAD_BYTES + ((half.to(tl.int64) * C_MAX_BLOCKS + block) * 2 + stage) * REGION
    # Without this word, each access would be of one element.
    return tl.multiple_of((address + start).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _read_flag(ptr):
    if INTERPRETED:
        flag = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
    else:
        flag = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return flag


@triton.jit
def _exchange(
    addresses_ptr, own, block, turn, most_polls, stage: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Signals that this program has written its part, and waits for the other ranks' parts."""
    tl.debug_barrier()  # The writes of all threads come before the flag.
    for away in tl.static_range(1, SIZE):
        address = tl.load(addresses_ptr + (RANK + away) % SIZE)
        tl.atomic_xchg(_flag(address, block, stage, RANK), turn, sem="release", scope="sys")
    polls = 0
    for away in tl.static_range(1, SIZE):
        ptr = _flag(own, block, stage, (RANK + away) % SIZE)
        flag = _read_flag(ptr)
        while (flag - turn < 0) & (polls != most_polls):
            flag = _read_flag(ptr)
            polls += (most_polls >= 0).to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _one_shot(
    x,
    addresses_ptr,
    own,
    block,
    turn,
    most_polls,
    at,
    inside,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    REGION: tl.constexpr,
):
    """The sum of the ranks' x, float32. Block positions `at`; only those `inside` belong to the message."""
    part: tl.constexpr = REGION // SIZE // (x.dtype.primitive_bitwidth // 8)  # elements of a rank in a region
    for away in tl.static_range(1, SIZE):
        address = tl.load(addresses_ptr + (RANK + away) % SIZE)
        theirs = _region(address, block, turn & 1, 0, REGION, x.dtype)
        tl.store(theirs + RANK * part + at, x, mask=inside)
    _exchange(addresses_ptr, own, block, turn, most_polls, 0, RANK, SIZE)
    ours = _region(own, block, turn & 1, 0, REGION, x.dtype)
    total = tl.zeros(x.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            theirs = tl.load(ours + rank * part + at, mask=inside, other=0.0, cache_modifier=".cg")
            total += theirs.to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def _two_shot(
    x_ptr,
    addresses_ptr,
    own,
    block,
    turn,
    most_polls,
    at,
    inside,
    num_left,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    REGION: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARD: tl.constexpr,
    SHARD_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The same for the elements from x_ptr on; `num_left` belong to the message. Rank r sums the
    positions [r * SHARD, (r + 1) * SHARD). Sums beyond the message are not read."""
    i = tl.arange(0, SHARD_BLOCK)
    for rank in tl.static_range(SIZE):
        address = tl.load(addresses_ptr + rank)
        theirs = _region(address, block, turn & 1, 0, REGION, DTYPE)
        there = (i < SHARD) & (rank * SHARD + i < CHUNK) & (rank * SHARD + i < num_left)
        shard = tl.load(x_ptr + rank * SHARD + i, mask=there, other=0.0)
        tl.store(theirs + RANK * SHARD + i, shard, mask=there)
    _exchange(addresses_ptr, own, block, turn, most_polls, 0, RANK, SIZE)
    ours = _region(own, block, turn & 1, 0, REGION, DTYPE)
    total = tl.zeros((SHARD_BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        shard = tl.load(ours + rank * SHARD + i, mask=i < SHARD, other=0.0, cache_modifier=".cg")
        total += shard.to(tl.float32)
    for rank in tl.static_range(SIZE):
        address = tl.load(addresses_ptr + rank)
        theirs = _region(address, block, turn & 1, 1, REGION, DTYPE)
        tl.store(theirs + RANK * SHARD + i, total.to(DTYPE), mask=i < SHARD)
    _exchange(addresses_ptr, own, block, turn, most_polls, 1, RANK, SIZE)
    sums = _region(own, block, turn & 1, 1, REGION, DTYPE)
    return tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["most_polls"])
def _all_reduce_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    addresses_ptr,
    eps,
    n,
    most_polls,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARD: tl.constexpr,
    SHARD_BLOCK: tl.constexpr,
    REGION: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sums CHUNK of the n elements. NORM: these are a row, to which the residual is added in place,
    and whose norm goes to `out_ptr`; otherwise the sum does."""
    block = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    first = block.to(tl.int64) * CHUNK
    num_left = n - block * CHUNK
    inside = (at < CHUNK) & (at < num_left)
    if NORM:
        weight = tl.load(weight_ptr + at, mask=at < CHUNK, other=0.0).to(tl.float32)
    own = tl.load(addresses_ptr + RANK)
    counter_ptr = own.to(tl.pointer_type(tl.int32)) + block
    wait_for_inputs(PDL)
    turn = tl.load(counter_ptr) + 1
    if TWO_SHOT:
        total = _two_shot(
            x_ptr + first,
            addresses_ptr,
            own,
            block,
            turn,
            most_polls,
            at,
            inside,
            num_left,
            RANK,
            SIZE,
            REGION,
            CHUNK,
            SHARD,
            SHARD_BLOCK,
            x_ptr.dtype.element_ty,
        )
    else:
        x = tl.load(x_ptr + first + at, mask=inside, other=0.0)
        total = _one_shot(x, addresses_ptr, own, block, turn, most_polls, at, inside, RANK, SIZE, REGION)
    if NORM:
        before = tl.load(residual_ptr + first + at, mask=inside, other=0.0)
        total = (total.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual_ptr + first + at, total, mask=inside)
        x32 = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / CHUNK + eps)
        normed = (x32 * scale).to(total.dtype).to(tl.float32)
        tl.store(out_ptr + first + at, (normed * weight).to(total.dtype), mask=inside)
    else:
        tl.store(out_ptr + first + at, total, mask=inside)
    tl.store(counter_ptr, turn)


def all_reduce(peers: Peers, x: torch.Tensor, way: Way | None = None) -> torch.Tensor:
    """Sums x over the ranks, in place, and returns it."""
    assert x.is_contiguous() and peers.takes_plain(x)
    _launch(peers, x, None, None, x, 0.0, PLAIN_BLOCK, way)
    return x


def all_reduce_add_rms_norm(
    peers: Peers,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    way: Way | None = None,
) -> torch.Tensor:
    """residual += the sum of the ranks' x, in place; returns the norm of that."""
    assert x_TD.is_contiguous() and residual_TD.is_contiguous()
    assert peers.takes(len(x_TD), x_TD.shape[1] * x_TD.itemsize)
    out_TD = empty_matmul_input(x_TD, *x_TD.shape)
    _launch(peers, x_TD, residual_TD, weight_D, out_TD, eps, x_TD.shape[1], way)
    return out_TD


def _launch(
    peers: Peers,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    chunk: int,
    way: Way | None,
) -> None:
    way = way or choose_way(x.nbytes, peers.size)
    block = next_power_of_2(chunk)
    shard = cdiv(chunk, peers.size * ALIGNED) * ALIGNED
    _all_reduce_kernel[(cdiv(x.numel(), chunk),)](
        x,
        residual,
        weight,
        out,
        peers.addresses,
        eps,
        x.numel(),
        peers.most_polls,
        RANK=peers.rank,
        SIZE=peers.size,
        CHUNK=chunk,
        BLOCK=block,
        SHARD=shard,
        SHARD_BLOCK=next_power_of_2(shard),
        REGION=region_bytes(peers.block_bytes, peers.size),
        TWO_SHOT=way is Way.TWO_SHOT,
        NORM=residual is not None,
        num_warps=min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 16),
        **pdl_options(),
    )
