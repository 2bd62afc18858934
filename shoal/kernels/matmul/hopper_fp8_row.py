"""Matmuls of one row with a large weight in fp8 (e4m3) on Hopper, in Gluon.

To widen such a weight in registers takes more instructions than an SM can issue while memory brings the next
one. So weights never come to registers: a ring of tiles in shared memory, filled by the copy engine (TMA)
from before the row is there (pdl.py), feeds the tensor cores as it lies.

The row, too, has to be in fp8 then, but nothing of it is lost: it is taken times a power of two and cut in
two numbers of 4 bits each, x = high + low / 16. All 8 bits of a bf16 number are there if it is not smaller
than 2^-14 of the row's largest one, and what a smaller one loses is less than 2^-17 of the largest.

A tile has 128 rows for the tensor cores. They are 16 outputs by 8 slices of the inputs, so that a weight with
few outputs too has work for all SMs. The matmul with high and low of all 8 slices is made, and the part is
taken that belongs together. Tensor cores add fp8 in fewer bits than float32, so sums are promoted
every 128 inputs, where they may also get the scale of their group.

I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matmul with the
unpacked matrix; figures are in benchmarks/results/matmul.md.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.kernels.hopper import barrier
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import wait_for_inputs
from shoal.kernels.matmul.hopper_row import row_epilogue
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2

OUTS: gl.constexpr = gl.constexpr(16)  # outputs of a strip
SLICES: gl.constexpr = gl.constexpr(8)  # slices of a tile's inputs
PART: gl.constexpr = gl.constexpr(128)  # inputs of a slice: as many bytes as TMA swizzles as one row
# Tiles of 16 KB in the ring. A gated matmul has half as many places, each for a tile of gate and one of up.
# They take more than half of an SM's memory, for hopper_row.py's reason.
STAGES: gl.constexpr = gl.constexpr(8)
# Tiles requested before the row is there. The row would have to wait behind more of them, and
# so would what the kernels before still read.
EARLY: gl.constexpr = gl.constexpr(6)
WARPS: gl.constexpr = gl.constexpr(8)  # They share a tile's rows for the tensor cores, 16 each.
LARGEST_SHIFT: gl.constexpr = gl.constexpr(7)  # The row's largest number becomes 2^7 to 2^8.


@gluon.jit
def _request(stage, strip, k_tile, pred, memory, O, GATED: gl.constexpr, GROUPED: gl.constexpr):
    """Requests a tile of this program: a k-tile of a strip of outputs, and its scales."""
    weight_desc, scales_desc, weight_smem, scales_smem, full = memory
    SCALES: gl.constexpr = scales_desc.block_type.nbytes if GROUPED else 0
    BYTES: gl.constexpr = (1 + GATED) * (weight_desc.block_type.nbytes + SCALES)
    out = (gl.program_id(0) + strip * gl.num_programs(0)) * OUTS
    mbarrier.expect(full.index(stage), BYTES, pred=pred)
    for half in gl.static_range(1 + GATED):
        place = stage * (1 + GATED) + half
        tma.async_copy_global_to_shared(
            weight_desc,
            [out + half * O, k_tile * SLICES, 0],
            full.index(stage),
            weight_smem.index(place),
            pred=pred,
        )
        if GROUPED:
            tma.async_copy_global_to_shared(
                scales_desc,
                [k_tile * SLICES, out + half * O],
                full.index(stage),
                scales_smem.index(place),
                pred=pred,
            )


@gluon.jit
def following(number, carried, count):
    """The number after this one, which is 0 again after `count` of them, and then one more is carried."""
    over = (number + 1 == count).to(gl.int32)
    return number + 1 - over * count, carried + over


@gluon.jit
def _scaled(part, scales_smem, place, GROUPED: gl.constexpr, mma: gl.constexpr):
    if GROUPED:
        of_rows: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[2, 0], [4, 0], [8, 0]], [], [OUTS, SLICES]
        )
        scales = scales_smem.index(place).permute((1, 0)).load(of_rows).reshape((OUTS * SLICES,))
        part *= gl.convert_layout(scales, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    return part


@gluon.jit
def put_row(x, x_smem):
    """Puts a row, [parts, 128] in float32, into shared memory as high and low in fp8, [2 parts, 128]. Returns
    the row times a power of two, as high and low stand for it, and what makes up for that power."""
    largest = gl.max(gl.max(gl.abs(x), axis=1), axis=0)
    # Powers of two are made of float32's bits. The scale of a row with an infinite number is NaN, as its
    # products are.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 8)
    larger = ((254 + LARGEST_SHIFT - exponent) << 23).to(gl.float32, bitcast=True)
    smaller = ((exponent - LARGEST_SHIFT) << 23).to(gl.float32, bitcast=True)
    smaller = gl.where(exponent == 255, float("nan"), smaller)
    x *= larger
    # The first 4 bits are kept, as the numbers that rounding to fp8 gives come back in another order from
    # Triton 3.6's conversion to float32.
    high = (x.to(gl.int32, bitcast=True) & -0x100000).to(gl.float32, bitcast=True)
    both = gl.join(high.to(x_smem.dtype), ((x - high) * 16.0).to(x_smem.dtype))
    x_smem.store(both.permute((0, 2, 1)).reshape(x_smem.shape))
    fence_async_shared()
    barrier()
    return x, smaller


@gluon.jit
def outputs(sums, layout: gl.constexpr, mma: gl.constexpr, BY_SLICE: gl.constexpr):
    """The sums of a strip's outputs: what each slice has with its own inputs, high and low. BY_SLICE: the
    rows of a slice follow each other, otherwise the rows of an output."""
    SLICES: gl.constexpr = sums.shape[1] // 2
    row = gl.arange(0, OUTS * SLICES, gl.SliceLayout(1, mma))[:, None]
    column = gl.arange(0, 2 * SLICES, gl.SliceLayout(0, mma))[None, :]
    own = gl.where(column % 2 == 0, sums, sums * 0.0625)
    own = gl.where((row // OUTS if BY_SLICE else row % SLICES) == column // 2, own, 0.0)
    if BY_SLICE:
        result = gl.sum(gl.sum(own, axis=1).reshape((SLICES, OUTS)), axis=0)
    else:
        result = gl.sum(gl.sum(own, axis=1).reshape((OUTS, SLICES)), axis=1)
    return gl.convert_layout(result, layout)


@gluon.jit
def normed(x, norm, I, eps, dtype: gl.constexpr):
    """RMSNorm of a row in float32, rounded where the norm's own kernel rounds."""
    scale = gl.rsqrt(gl.sum(gl.sum(x * x, axis=1), axis=0) / I + eps)
    return ((x * scale).to(norm.dtype).to(gl.float32) * norm.to(gl.float32)).to(dtype).to(gl.float32)


@gluon.jit
def hopper_fp8_row_kernel(
    x_ptr,
    norm_ptr,
    weight_desc,
    scales_desc,
    scales_ptr,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    k_tiles,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    GROUPED: gl.constexpr,
    BLOCK_X: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes strips of outputs, `k_tiles` tiles each: this program's first, then each one that lies a grid
    further. GROUPED: 128 inputs share a scale, otherwise all. BLOCK_X >= I."""
    gl.static_assert(num_warps == WARPS)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    FP8: gl.constexpr = weight_desc.dtype
    RING: gl.constexpr = STAGES // (1 + GATED)
    COLUMNS: gl.constexpr = 2 * SLICES  # columns of the right operand: high and low of each slice
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLUMNS, 32])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    weight_smem = gl.allocate_shared_memory(FP8, [STAGES, OUTS, SLICES, PART], weight_desc.layout)
    weights = weight_smem._reinterpret(FP8, [STAGES, OUTS * SLICES, PART], swizzled)
    scales_smem, tile_scales = weight_smem, weight_smem
    if GROUPED:
        scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, SLICES, OUTS], scales_desc.layout)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        tile_scales = scales_smem._reinterpret(gl.float32, [STAGES, SLICES, OUTS], plain)
    x_smem = gl.allocate_shared_memory(FP8, [BLOCK_X // (SLICES * PART), COLUMNS, PART], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
    mine = gl.cdiv(gl.cdiv(O, OUTS) - gl.program_id(0), gl.num_programs(0))
    memory = (weight_desc, scales_desc, weight_smem, scales_smem, full)
    next_k_tile, next_strip = 0, 0
    for stage in range(EARLY // (1 + GATED)):
        _request(stage, next_strip, next_k_tile, next_strip < mine, memory, O, GATED, GROUPED)
        next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)

    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    part = gl.arange(0, BLOCK_X // PART, gl.SliceLayout(1, layout))
    at = part[:, None] * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))[None, :]
    if norm_ptr is not None:
        norm = gl.load(norm_ptr + at, mask=at < I, other=0.0)
    wait_for_inputs(PDL)
    x = gl.load(x_ptr + at, mask=at < I, other=0.0)
    for stage in range(EARLY // (1 + GATED), RING):
        _request(stage, next_strip, next_k_tile, next_strip < mine, memory, O, GATED, GROUPED)
        next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)
    x = x.to(gl.float32)
    if norm_ptr is not None:
        x = normed(x, norm, I, eps, DTYPE)
    x, smaller = put_row(x, x_smem._reinterpret(FP8, [BLOCK_X // PART * 2, PART], swizzled))

    line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    stage, turn = 0, 0
    for strip in range(mine):
        out = (gl.program_id(0) + strip * gl.num_programs(0)) * OUTS + gl.arange(0, OUTS, line)
        if ADD:
            before = gl.load(out_ptr + out, mask=out < O, other=0.0)
        if not GROUPED:
            scale = gl.load(scales_ptr + out, mask=out < O, other=0.0)
            if GATED:
                up_scale = gl.load(scales_ptr + O + out, mask=out < O, other=0.0)
        sums = gl.zeros((OUTS * SLICES, COLUMNS), gl.float32, mma)
        up_sums = gl.zeros((OUTS * SLICES, COLUMNS), gl.float32, mma)
        for k_tile in range(k_tiles):
            place = stage * (1 + GATED)
            mbarrier.wait(full.index(stage), turn & 1)
            product = warpgroup_mma(
                weights.index(place), x_smem.index(k_tile).permute((1, 0)), sums, use_acc=False, is_async=True
            )
            up_product = product
            if GATED:
                up_product = warpgroup_mma(
                    weights.index(place + 1),
                    x_smem.index(k_tile).permute((1, 0)),
                    up_sums,
                    use_acc=False,
                    is_async=True,
                )
                product, up_product = warpgroup_mma_wait(0, deps=[product, up_product])
            else:
                product = warpgroup_mma_wait(0, deps=[product])
            product = _scaled(product, tile_scales, place, GROUPED, mma)
            if GATED:
                up_product = _scaled(up_product, tile_scales, place + 1, GROUPED, mma)
                up_sums += up_product
            sums += product
            barrier()  # All warps have read the tile.
            _request(stage, next_strip, next_k_tile, next_strip < mine, memory, O, GATED, GROUPED)
            next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)
            stage, turn = following(stage, turn, RING)
        result = outputs(sums, line, mma, False) * smaller
        up = result
        if GATED:
            up = outputs(up_sums, line, mma, False) * smaller
        if not GROUPED:
            result *= scale
            if GATED:
                up *= up_scale
        result = row_epilogue(result, up, bias_ptr, out, O, DTYPE, GATED)
        if ADD:
            result = (before.to(gl.float32) + result.to(gl.float32)).to(DTYPE)
        gl.store(out_ptr + out, result, mask=out < O)
    for i in gl.static_range(RING):
        mbarrier.invalidate(full.index(i))


def hopper_fp8_row_matmul(
    x_1I: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    bias: torch.Tensor | None,
    out_1O: torch.Tensor,
    *,
    gated: bool,
    add: bool,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated, into `out_1O`, or
    added to what it holds. With `norm_weight_I`, x is normalised first. data and scales: of an Fp8Matrix,
    whose groups are of 128 inputs or of all, and whose inputs are whole times 128."""
    inputs, outs = x_1I.shape[1], data.shape[0] // (1 + gated)
    columns = SLICES.value * PART.value
    described = TensorDescriptor(
        data,
        [data.shape[0], inputs // PART.value, PART.value],
        [inputs, PART.value, 1],
        [OUTS.value, SLICES.value, PART.value],
        gl.NVMMASharedLayout(128, 8, rank=3),
    )
    described_scales = None
    if group:
        described_scales = TensorDescriptor(
            scales,
            list(scales.shape),
            [scales.shape[1], 1],
            [SLICES.value, OUTS.value],
            gl.NVMMASharedLayout(0, 32),
        )
    hopper_fp8_row_kernel[(min(dispatch.gpu_of(x_1I.device).sms, cdiv(outs, OUTS.value)),)](
        x_1I,
        norm_weight_I,
        described,
        described_scales,
        scales,
        bias,
        out_1O,
        eps,
        outs,
        inputs,
        cdiv(inputs, columns),
        GATED=gated,
        ADD=add,
        GROUPED=group > 0,
        BLOCK_X=max(columns, next_power_of_2(inputs)),
        num_warps=WARPS.value,
        **pdl_options(),
    )
