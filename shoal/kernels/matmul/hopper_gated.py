"""activation(x @ gate^T) * (x @ up^T) of thousands of rows on Hopper, in Gluon.

As a kernel of its own, activation * up is a pass over twice the outputs, which takes a noticeable part of the
time of a matmul with few inputs.

Programs stay on their SMs and go from tile to tile. A producer warp keeps the copy engine (TMA) four tiles of
inputs ahead of them, over the ends of output tiles too. Two warpgroups of 64 rows share each tile of gate and
up, which are the two halves of one matmul, and round both as two matmuls would. TMA also stores the
results. Tiles are taken in bands of 16 tiles of rows, so that what runs side by side reads few rows and
weights, from the L2 cache.

Figures are in benchmarks/results/matmul.md. T rows · I inputs · F outputs. The oracle is reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shoal.kernels.hopper import barrier
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import descriptor, gate_mul
from shoal.kernels.rounding import cdiv

ROWS: gl.constexpr = gl.constexpr(64)  # rows of a warpgroup
BLOCK_F: gl.constexpr = gl.constexpr(128)
BLOCK_I: gl.constexpr = gl.constexpr(64)  # 128 bytes, which tensor cores and TMA swizzle as one row
STAGES: gl.constexpr = gl.constexpr(4)
BAND: gl.constexpr = gl.constexpr(16)


@gluon.jit
def _tile(item, row_tiles, out_tiles):
    """The tile of rows and the tile of outputs of an item."""
    first = item // (BAND * out_tiles) * BAND
    height = gl.minimum(row_tiles - first, BAND)
    within = item % (BAND * out_tiles)
    return first + within % height, within // height


@gluon.jit
def _fetch(x_desc, weight_desc, ring, sizes, F):
    """The work of the producer warp."""
    x_smem, weight_smem, full, free = ring
    steps, row_tiles, out_tiles = sizes
    BYTES: gl.constexpr = 2 * (x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        row_tile, out_tile = _tile(item, row_tiles, out_tiles)
        row, out = row_tile * (2 * ROWS), out_tile * BLOCK_F
        for step in range(steps):
            stage, column = count % STAGES, step * BLOCK_I
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc, [row + half * ROWS, column], full.index(stage), x_smem.index(2 * stage + half)
                )
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [out + half * F, column],
                    full.index(stage),
                    weight_smem.index(2 * stage + half),
                )
            count += 1


@gluon.jit
def _multiply(out_desc, out_smem, ring, sizes, ACTIVATION: gl.constexpr, HALF: gl.constexpr):
    """The work of a warpgroup, on half of each tile's rows."""
    x_smem, weight_smem, full, free = ring
    steps, row_tiles, out_tiles = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_F, 16])
    dtype: gl.constexpr = x_smem.dtype
    # gate above up
    weights = weight_smem._reinterpret(dtype, [STAGES, 2 * BLOCK_F, BLOCK_I], weight_smem.layout)
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        row_tile, out_tile = _tile(item, row_tiles, out_tiles)
        sums = gl.zeros([ROWS, 2 * BLOCK_F], gl.float32, mma)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            sums = warpgroup_mma(
                x_smem.index(2 * stage + HALF), weights.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_wait(1, deps=[sums])
            # The stage before is free again.
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))

        gate, up = gl.split(sums.reshape((ROWS, 2, BLOCK_F)).permute((0, 2, 1)))
        result = gate_mul(gate, up, ACTIVATION, dtype)
        tma.store_wait(0)  # TMA has read the results of the tile before.
        barrier()
        out_smem.store(result)
        fence_async_shared()
        barrier()  # One thread speaks for all.
        tma.async_copy_shared_to_global(
            out_desc, [(2 * row_tile + HALF) * ROWS, out_tile * BLOCK_F], out_smem
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles"])
def hopper_gated_kernel(
    x_desc, weight_desc, out_desc, F, steps, row_tiles, out_tiles, ACTIVATION: gl.constexpr
):
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_I], x_desc.layout)
    # gate, then up
    weight_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_F, BLOCK_I], weight_desc.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_F], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    ring, sizes = (x_smem, weight_smem, full, free), (steps, row_tiles, out_tiles)
    gl.warp_specialize(
        [
            (_multiply, (out_desc, out_smem.index(0), ring, sizes, ACTIVATION, 0)),
            (_multiply, (out_desc, out_smem.index(1), ring, sizes, ACTIVATION, 1)),
            (_fetch, (x_desc, weight_desc, ring, sizes, F)),
        ],
        [4, 1],
        [232, 40],
    )  # warps, and registers a thread, of all but the first


def hopper_gated_matmul(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, activation: str = "silu"
) -> torch.Tensor:
    """Returns activation(gate) * up, [T, F]. Gate is the first half of the weight's rows. Bits depend neither
    on timing nor on the number of rows."""
    assert x_TI.is_contiguous() and weight_2FI.is_contiguous()
    (rows, inputs), size = x_TI.shape, weight_2FI.shape[0] // 2
    out_TF = x_TI.new_empty((rows, size))
    row_tiles, out_tiles = cdiv(rows, 2 * ROWS.value), cdiv(size, BLOCK_F.value)
    hopper_gated_kernel[(min(dispatch.gpu_of(x_TI.device).sms, row_tiles * out_tiles),)](
        descriptor(x_TI, ROWS.value, BLOCK_I.value),
        descriptor(weight_2FI, BLOCK_F.value, BLOCK_I.value),
        descriptor(out_TF, ROWS.value, BLOCK_F.value),
        size,
        cdiv(inputs, BLOCK_I.value),
        row_tiles,
        out_tiles,
        ACTIVATION=activation,
        num_warps=4,
        maxnreg=168,
    )
    return out_TF
