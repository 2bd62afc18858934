"""Matmuls of one row with a large weight of 4 bits on Hopper, in Gluon: hopper_fp8_row.py's way, with
weights that lie as gpu_weight.py lays them.

A quant of 4 bits, taken as it is, is a small number of fp8. The lanes of a warp have just the weights that
they have to feed to the tensor cores, so a mask makes operands: the low halves of a word's bytes are weights
of one output, the high halves of another. The row lies in shared memory in the order that these have.

A ring of tiles is on its way from before the row is there. A tile is 16 outputs by 4 slices of 256 inputs,
one a warp, with the scales of each slice's two groups. What quants are too large by (8, or the zero point) is
a matmul of the group's minimum and the sum of its inputs.

I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matmul with the
unpacked matrix; figures are in benchmarks/results/matmul.md.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.kernels.hopper import barrier
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_fp8_row import OUTS, PART, following, normed, outputs, put_row
from shoal.kernels.matmul.hopper_linear import wait_for_inputs
from shoal.kernels.matmul.hopper_row import row_epilogue
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2

SLICES: gl.constexpr = gl.constexpr(4)  # slices of a tile's inputs, one per warp
COLUMNS: gl.constexpr = gl.constexpr(2 * SLICES.value)  # two per slice: high and low
STEPS: gl.constexpr = gl.constexpr(16)  # steps per tile: 64 inputs of 16 outputs, 16 bytes per lane
SCALE_GROUPS: gl.constexpr = gl.constexpr(8)  # groups of a tile's inputs
# Tiles of 8 KB in the ring. A gated matmul has half as many places, each for a tile of gate and one of up.
STAGES: gl.constexpr = gl.constexpr(6)
EARLY: gl.constexpr = gl.constexpr(2)  # tiles requested before the row is there, as in hopper_fp8_row.py
# From gpu_weight.py's scales and minima in bf16 to scales and minima of quants in fp8.
SCALE: gl.constexpr = gl.constexpr(2.0**-108)
MINIMUM: gl.constexpr = gl.constexpr(2.0**16)
ZERO: gl.constexpr = gl.constexpr(-8 * 2.0**-9)  # the zero of a symmetric quant, in those scales

PROGRAMS = 3  # that an SM has at once: one multiplies while others make operands


@gluon.jit
def _request(stage, strip, k_tile, pred, memory, to_up, k_tiles, GATED: gl.constexpr, MINIMA: gl.constexpr):
    """Requests a tile of this program: a k-tile of a strip of outputs, and its scales."""
    words_desc, scales_desc, minima_desc, words_smem, scales_smem, minima_smem, full = memory
    BYTES: gl.constexpr = words_desc.block_type.nbytes + (1 + MINIMA) * scales_desc.block_type.nbytes
    outs = gl.program_id(0) + strip * gl.num_programs(0)
    mbarrier.expect(full.index(stage), (1 + GATED) * BYTES, pred=pred)
    for half in gl.static_range(1 + GATED):
        tile = (outs + half * to_up) * k_tiles + k_tile
        place = stage * (1 + GATED) + half
        tma.async_copy_global_to_shared(
            words_desc, [tile * STEPS, 0], full.index(stage), words_smem.index(place), pred=pred
        )
        tma.async_copy_global_to_shared(
            scales_desc, [tile * SCALE_GROUPS, 0], full.index(stage), scales_smem.index(place), pred=pred
        )
        if MINIMA:
            tma.async_copy_global_to_shared(
                minima_desc, [tile * SCALE_GROUPS, 0], full.index(stage), minima_smem.index(place), pred=pred
            )


@gluon.jit
def _in_order(x):
    """Puts the inputs of each part, which come in the row's order, in the weights' order. A thread has whole
    sixteens of them, so that none goes to another one."""
    PARTS: gl.constexpr = x.shape[0]
    return x.reshape((PARTS, PART // 16, 2, 4, 2)).permute((0, 1, 3, 4, 2)).reshape((PARTS, PART))


@gluon.jit
def _quants(words, asm: gl.constexpr):
    """Returns four quants of 4 bits of each word, one a byte. It is written in assembler, as the compiler
    would take the bytes apart and put them together again."""
    four: gl.constexpr = gl.DistributedLinearLayout(
        [
            [0, 0, 0, 0, 0, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0, 0],
        ],
        [
            [0, 0, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 2, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 0],
            [0, 0, 2, 0, 0, 0, 0, 0],
            [0, 0, 4, 0, 0, 0, 0, 0],
        ],
        [[1, 0, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]],
        [],
        [SLICES, 2, 8, 4, 2, 2, 2, 2],
    )  # A word's four bytes are neighbours, so that an assembler's register has them.
    words = gl.join(words, words)
    words = gl.convert_layout(gl.join(words, words), four, assert_trivial=True)
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [words], gl.int8, True, 4)


@gluon.jit
def _operand(words, dot: gl.constexpr):
    """Quants of 4 bits as numbers of fp8, [64, 128]. words: int32, by slice, step, lane's output and place,
    two and two words."""
    low = _quants(words, "and.b32 $0, $1, 0x0F0F0F0F;")
    high = _quants(words, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }")
    quants = gl.join(low, high).to(gl.float8e4nv, bitcast=True)
    quants = quants.permute((0, 8, 2, 1, 4, 5, 3, 6, 7)).reshape((OUTS * SLICES, PART))
    return gl.convert_layout(quants, dot, assert_trivial=True)


@gluon.jit
def _pairs(smem, place, pairs: gl.constexpr):
    """The numbers in bf16 of each slice's two groups, one after the other: of outputs g and of outputs g + 8,
    [4 slices, 8]."""
    both: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [SLICES, 2, 8],
    )  # as the tensor cores' rows lie, two of them together
    first, last = gl.split(smem.index(place).load(both).permute((0, 2, 1)))
    first = gl.convert_layout(first, pairs, assert_trivial=True)
    last = gl.convert_layout(last, pairs, assert_trivial=True)
    return (
        (first << 16).to(gl.float32, bitcast=True),
        (first & -65536).to(gl.float32, bitcast=True),
        (last << 16).to(gl.float32, bitcast=True),
        (last & -65536).to(gl.float32, bitcast=True),
    )


@gluon.jit
def _add(part, low, high, low_minimum, high_minimum, x_sum, sums, lowest, highest, mma: gl.constexpr):
    """Adds the matmul of a half of a tile, with its scales, and what its minima are with the sums of its
    inputs."""
    rows = gl.join(low, high).permute((0, 2, 1)).reshape((OUTS * SLICES,))
    sums += part * gl.convert_layout(rows, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    x = x_sum[:, None]
    return sums, lowest + low_minimum * x, highest + high_minimum * x


@gluon.jit
def _tile(
    words_smem,
    scales_smem,
    minima_smem,
    x_smem,
    x_sums,
    place,
    k_tile,
    sums,
    lowest,
    highest,
    MINIMA: gl.constexpr,
    mma: gl.constexpr,
):
    """Adds a tile's matmul to the sums, and its minima's to the sums of outputs g and g + 8."""
    words_layout: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 32, 1], [SLICES, 1, 1], [2, 1, 0])
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    pairs: gl.constexpr = lowest.type.layout
    words = words_smem.index(place).load(words_layout)
    words = words.reshape((SLICES, 2, 2, 8, 4, 2, 2)).permute((0, 2, 3, 4, 5, 6, 1))  # The last is the half.
    first, last = gl.split(words)
    a = warpgroup_mma(
        _operand(first, dot), x_smem.index(k_tile * 2).permute((1, 0)), sums, use_acc=False, is_async=True
    )
    b = warpgroup_mma(
        _operand(last, dot), x_smem.index(k_tile * 2 + 1).permute((1, 0)), sums, use_acc=False, is_async=True
    )
    a_low, a_high, b_low, b_high = _pairs(scales_smem, place, pairs)
    a_low, a_high, b_low, b_high = a_low * SCALE, a_high * (SCALE * 16), b_low * SCALE, b_high * (SCALE * 16)
    c_low, c_high, d_low, d_high = a_low, a_high, b_low, b_high
    if MINIMA:
        c_low, c_high, d_low, d_high = _pairs(minima_smem, place, pairs)
        c_low, c_high, d_low, d_high = c_low * MINIMUM, c_high * MINIMUM, d_low * MINIMUM, d_high * MINIMUM
    of_slices: gl.constexpr = gl.SliceLayout(1, pairs)
    x_first, x_last = x_sums.index(k_tile * 2).load(of_slices), x_sums.index(k_tile * 2 + 1).load(of_slices)
    a, b = warpgroup_mma_wait(0, deps=[a, b])
    sums, lowest, highest = _add(a, a_low, a_high, c_low, c_high, x_first, sums, lowest, highest, mma)
    return _add(b, b_low, b_high, d_low, d_high, x_last, sums, lowest, highest, mma)


@gluon.jit
def _outputs(sums, lowest, highest, line: gl.constexpr, mma: gl.constexpr):
    low = gl.join(gl.sum(lowest, axis=0), gl.sum(highest, axis=0)).permute((1, 0)).reshape((OUTS,))
    return outputs(sums, line, mma, True) + gl.convert_layout(low, line)


@gluon.jit
def hopper_int4_row_kernel(
    x_ptr,
    norm_ptr,
    words_desc,
    scales_desc,
    minima_desc,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    to_up,
    k_tiles,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    BLOCK_X: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes strips of outputs, `k_tiles` tiles each: this program's first, then each one that lies a grid
    further. `to_up`: strips from gate to up. BLOCK_X >= I."""
    gl.static_assert(num_warps == SLICES)
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    FP8: gl.constexpr = gl.float8e4nv
    MINIMA: gl.constexpr = minima_desc is not None
    RING: gl.constexpr = STAGES // (1 + GATED)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, COLUMNS, 32])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    words_smem = gl.allocate_shared_memory(gl.int32, [STAGES, STEPS, 128], words_desc.layout)
    words = words_smem._reinterpret(gl.int32, [STAGES, STEPS, 32, 4], plain)
    scales_smem = gl.allocate_shared_memory(gl.int32, [STAGES, SCALE_GROUPS, 8], scales_desc.layout)
    scales = scales_smem._reinterpret(gl.int32, [STAGES, SLICES, 2, 8], plain)
    minima_smem, minima = scales_smem, scales
    if MINIMA:
        minima_smem = gl.allocate_shared_memory(gl.int32, [STAGES, SCALE_GROUPS, 8], scales_desc.layout)
        minima = minima_smem._reinterpret(gl.int32, [STAGES, SLICES, 2, 8], plain)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
    PARTS: gl.constexpr = BLOCK_X // PART
    x_smem = gl.allocate_shared_memory(FP8, [PARTS // SLICES, COLUMNS, PART], swizzled)
    line_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums_smem = gl.allocate_shared_memory(gl.float32, [PARTS], line_shared)
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [SLICES, 8]
    )  # as `_pairs` are
    mine = gl.cdiv(gl.cdiv(O, OUTS) - gl.program_id(0), gl.num_programs(0))
    memory = (words_desc, scales_desc, minima_desc, words_smem, scales_smem, minima_smem, full)
    next_k_tile, next_strip = 0, 0
    for stage in range(EARLY // (1 + GATED)):
        _request(stage, next_strip, next_k_tile, next_strip < mine, memory, to_up, k_tiles, GATED, MINIMA)
        next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)

    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [num_warps, 1], [1, 0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, layout))  # index over k-tile, half and slice
    first = (part // 8 * 8 + part % SLICES * 2 + part // SLICES % 2) * PART
    at = first[:, None] + gl.arange(0, PART, gl.SliceLayout(0, layout))[None, :]
    if norm_ptr is not None:
        norm = gl.load(norm_ptr + at, mask=at < I, other=0.0)
    wait_for_inputs(PDL)
    x = gl.load(x_ptr + at, mask=at < I, other=0.0)
    for stage in range(EARLY // (1 + GATED), RING):
        _request(stage, next_strip, next_k_tile, next_strip < mine, memory, to_up, k_tiles, GATED, MINIMA)
        next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)
    x = x.to(gl.float32)
    if norm_ptr is not None:
        x = normed(x, norm, I, eps, DTYPE)
    x, smaller = put_row(_in_order(x), x_smem._reinterpret(FP8, [PARTS * 2, PART], swizzled))
    x_sum = gl.sum(x, axis=1)
    sums_smem.store(x_sum if MINIMA else x_sum * ZERO)
    x_sums = sums_smem._reinterpret(gl.float32, [PARTS // SLICES, SLICES], line_shared)

    line: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    stage, turn = 0, 0
    for strip in range(mine):
        out = (gl.program_id(0) + strip * gl.num_programs(0)) * OUTS + gl.arange(0, OUTS, line)
        if ADD:
            before = gl.load(out_ptr + out, mask=out < O, other=0.0)
        sums = gl.zeros((OUTS * SLICES, COLUMNS), gl.float32, mma)
        up_sums = gl.zeros((OUTS * SLICES, COLUMNS), gl.float32, mma)
        lowest = gl.zeros((SLICES, 8), gl.float32, pairs)
        highest, up_lowest, up_highest = lowest, lowest, lowest
        for k_tile in range(k_tiles):
            mbarrier.wait(full.index(stage), turn & 1)
            place = stage * (1 + GATED)
            sums, lowest, highest = _tile(
                words, scales, minima, x_smem, x_sums, place, k_tile, sums, lowest, highest, MINIMA, mma
            )
            if GATED:
                up_sums, up_lowest, up_highest = _tile(
                    words,
                    scales,
                    minima,
                    x_smem,
                    x_sums,
                    place + 1,
                    k_tile,
                    up_sums,
                    up_lowest,
                    up_highest,
                    MINIMA,
                    mma,
                )
            barrier()  # All warps have read the tile.
            _request(stage, next_strip, next_k_tile, next_strip < mine, memory, to_up, k_tiles, GATED, MINIMA)
            next_k_tile, next_strip = following(next_k_tile, next_strip, k_tiles)
            stage, turn = following(stage, turn, RING)
        result = _outputs(sums, lowest, highest, line, mma) * smaller
        up = result
        if GATED:
            up = _outputs(up_sums, up_lowest, up_highest, line, mma) * smaller
        result = row_epilogue(result, up, bias_ptr, out, O, DTYPE, GATED)
        if ADD:
            result = (before.to(gl.float32) + result.to(gl.float32)).to(DTYPE)
        gl.store(out_ptr + out, result, mask=out < O)
    for i in gl.static_range(RING):
        mbarrier.invalidate(full.index(i))


def hopper_int4_row_matmul(
    x_1I: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_1O: torch.Tensor,
    *,
    gated: bool,
    add: bool,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated, into `out_1O`, or
    added to what it holds. With `norm_weight_I`, x is normalised first. words, scales and minima: of a
    GpuWeight in bf16 of 4 bits, not e2m1, in groups of 128 inputs."""
    inputs, outs = x_1I.shape[1], out_1O.shape[1]
    columns = STEPS.value * 64
    assert inputs % columns == 0 and (not gated or outs % OUTS.value == 0)
    hopper_int4_row_kernel[(min(PROGRAMS * dispatch.gpu_of(x_1I.device).sms, cdiv(outs, OUTS.value)),)](
        x_1I,
        norm_weight_I,
        _described(words, 128, STEPS.value),
        _described(scales, 8, SCALE_GROUPS.value),
        None if minima is None else _described(minima, 8, SCALE_GROUPS.value),
        bias,
        out_1O,
        eps,
        outs,
        inputs,
        outs // OUTS.value,
        inputs // columns,
        GATED=gated,
        ADD=add,
        BLOCK_X=next_power_of_2(inputs),
        num_warps=SLICES.value,
        **pdl_options(),
    )


def _described(tensor: torch.Tensor, columns: int, rows: int) -> TensorDescriptor:
    """Returns a TMA descriptor of rows of `columns` columns; a tile has `rows` of them."""
    matrix = tensor.view(-1, columns)
    return TensorDescriptor(
        matrix, list(matrix.shape), [columns, 1], [rows, columns], gl.NVMMASharedLayout(0, 32)
    )
