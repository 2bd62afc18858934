"""The two matmuls of experts with weights in MXFP4 on Hopper, in Gluon, from a few rows an expert on.

Rows are a list of slots, which is sorted by experts and cut into tiles (moe.py). The first matmul gathers the
rows of the slots' tokens, ends with the activation, and writes in the list's order. The second one reads in
that order and scatters to slots.

The weights are the left operand. Four producer warps copy rows, words and scales to shared memory as they
are, some stages ahead. Two warpgroups share a tile's rows. Each reads the words of 2 x 64 outputs, in the
order of tensor cores (gpu_weight.py), and widens them in the registers that are wgmma's left operand: gate
and up, or 128 outputs. So a weight is read packed, and widened once for all rows of a tile. While one part is
multiplied, the next one is widened, and the words of the one after it are read.

Figures are in benchmarks/results/matmul.md. I inputs · O outputs (F of a gated matmul, whose weight has 2F
rows an expert). The oracle is moe/reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import gate_mul, squared_relu
from shoal.kernels.matmul.loaders import SMALLER, TiledWeight
from shoal.kernels.matmul.mxfp4_pairs import halves, placed, scaled
from shoal.kernels.matmul.tile_matmul import RowMap, Weight
from shoal.kernels.rounding import cdiv
from shoal.kinds.experts import Activation

PART: gl.constexpr = gl.constexpr(64)  # weight rows of a matmul; a warpgroup has two parts
BLOCK_I: gl.constexpr = gl.constexpr(64)
BAND: gl.constexpr = gl.constexpr(4)
DEPTH: gl.constexpr = gl.constexpr(3)  # steps of a stage
WARPGROUPS: gl.constexpr = gl.constexpr(2)  # warpgroups that multiply
# A step's words and scales of a part: 4 tiles of 16 outputs g + 8 h; lane 4 g + c; 4 words or 2 groups.
WORDS_LAYOUT: gl.constexpr = gl.constexpr(
    gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
)
SCALES_LAYOUT: gl.constexpr = gl.constexpr(
    gl.BlockedLayout([1, 1, 1, 2], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
)
STEP_WORDS: gl.constexpr = gl.constexpr(128)  # words of a tile of 16 outputs and a step
STEP_SCALES: gl.constexpr = gl.constexpr(16)


@gluon.jit
def _item(item, listed):
    """Returns an item's expert, where its rows start and the expert's end in the list, and its tile of
    outputs."""
    tiles_ptr, row_tiles, out_tiles = listed
    first = item // (BAND * out_tiles) * BAND
    height = gl.minimum(row_tiles - first, BAND)
    within = item % (BAND * out_tiles)
    tile_ptr = tiles_ptr + (first + within % height) * 3
    return gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), within // height


@gluon.jit
def _packed_tile(tile, expert, first_out, outs, GATED: gl.constexpr):
    """Returns the packed tiles, int64, of which a warpgroup's two parts consist. Tiles beyond an expert's
    last one are its last one again."""
    part, within = tile // 4, first_out // 16 + tile % 4
    if GATED:
        matrix = expert * 2 + part
    else:
        within += part * 4
        matrix = expert + part * 0
    last = outs // 16 - 1
    return matrix.to(gl.int64) * (outs // 16) + gl.where(within < last, within, last)


@gluon.jit
def _fetch(
    ring,
    listed,
    slots_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    outs,
    inputs,
    K: gl.constexpr,
    GATHERS: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """The work of the producer warps: a thread copies 16 bytes of a row or of words, or a scale."""
    x_smem, words_smem, scales_smem, full, free = ring
    _tiles_ptr, row_tiles, out_tiles = listed
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words_smem = words_smem._reinterpret(gl.int32, [STAGES * DEPTH * WARPGROUPS, 8, STEP_WORDS], flat)
    scales_smem = scales_smem._reinterpret(gl.int32, [STAGES * DEPTH * WARPGROUPS, 8, STEP_SCALES], flat)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_words: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    of_scales: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, copied))
    at = gl.arange(0, BLOCK_I, gl.SliceLayout(0, copied))
    words_tile = gl.arange(0, 8, gl.SliceLayout(1, of_words))
    scales_tile = gl.arange(0, 8, gl.SliceLayout(1, of_scales))
    word = gl.arange(0, STEP_WORDS, gl.SliceLayout(0, of_words))
    scale = gl.arange(0, STEP_SCALES, gl.SliceLayout(0, of_scales))
    OUTS: gl.constexpr = 2 * PART // (1 + GATED)
    steps = gl.cdiv(inputs, BLOCK_I)
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        expert, first, end, out_tile = _item(item, listed)
        inside = first + row < end
        source = first + row
        if GATHERS:
            source = gl.load(slots_ptr + source, mask=inside, other=0) // K
        x_ptrs = x_ptr + source.to(gl.int64)[:, None] * inputs + at[None, :]
        words_ptrs, scales_ptrs = (), ()
        for warpgroup in gl.static_range(WARPGROUPS):
            first_out = (out_tile * WARPGROUPS + warpgroup) * OUTS
            packed = _packed_tile(words_tile, expert, first_out, outs, GATED)
            packed_ptrs = words_ptr + (packed * (steps * STEP_WORDS))[:, None] + word[None, :]
            words_ptrs = words_ptrs + (packed_ptrs,)  # type: ignore
            packed = _packed_tile(scales_tile, expert, first_out, outs, GATED)
            packed_ptrs = scales_ptr + (packed * (steps * STEP_SCALES))[:, None] + scale[None, :]
            scales_ptrs = scales_ptrs + (packed_ptrs,)  # type: ignore
        for first_step in range(0, steps, DEPTH):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            for i in gl.static_range(DEPTH):
                place, step = stage * DEPTH + i, gl.minimum(first_step + i, steps - 1)
                for warpgroup in gl.static_range(WARPGROUPS):
                    async_copy.async_copy_global_to_shared(
                        words_smem.index(place * WARPGROUPS + warpgroup),
                        words_ptrs[warpgroup] + step * STEP_WORDS,
                    )
                    async_copy.async_copy_global_to_shared(
                        scales_smem.index(place * WARPGROUPS + warpgroup),
                        scales_ptrs[warpgroup] + step * STEP_SCALES,
                    )
                column = (first_step + i) * BLOCK_I
                mask = inside[:, None]
                if not EVEN:
                    mask = mask & (at[None, :] < inputs - column)
                async_copy.async_copy_global_to_shared(x_smem.index(place), x_ptrs + column, mask=mask)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            count += 1


@gluon.jit
def _four(scales):
    """Scales of two groups as scales of four words."""
    scales = gl.reshape(gl.join(scales, scales), (4, 8, 4, 4))
    return gl.convert_layout(scales, WORDS_LAYOUT, assert_trivial=True)


@gluon.jit
def _load_part(words_smem, scales_smem, place):
    """Returns the words and the scales of a part of a step."""
    words = words_smem.index(place).load(WORDS_LAYOUT)
    scales = scales_smem.index(place).permute((0, 2, 1)).load(gl.SliceLayout(2, SCALES_LAYOUT))
    return words, scales


@gluon.jit
def _operand(found, dtype: gl.constexpr, mma: gl.constexpr):
    """Returns the weights of 64 outputs and 64 inputs, [64, 64]. A lane, 4 g + c, has outputs g + 8 h and of
    each 16 inputs 8 u + 2 c + e; e counts the halves of a word."""
    NUMBERS: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    words, scales = found
    low, high = halves(scales[:, :, None, :] + gl.zeros([4, 8, 4, 2], gl.int32, SCALES_LAYOUT))
    low, high = _four(low), _four(high)
    top = gl.join(
        scaled(placed(words, 0, NUMBERS), low, NUMBERS), scaled(placed(words, 2, NUMBERS), low, NUMBERS)
    )
    bottom = gl.join(
        scaled(placed(words, 1, NUMBERS), high, NUMBERS), scaled(placed(words, 3, NUMBERS), high, NUMBERS)
    )
    pairs = gl.join(top, bottom)  # tile, g, c, word, u, h
    even = (pairs & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    weights = gl.permute(gl.join(even, odd), (0, 5, 1, 3, 4, 2, 6))
    weights = gl.reshape(weights, (PART, BLOCK_I))
    return gl.convert_layout(weights, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.constexpr_function
def _stored_layout(rows):
    """16 bytes of a row a thread, and 16 of the same row beside them. A warp has outputs of its own sums."""
    registers = [[0, 1], [0, 2], [0, 4]] + [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    lanes = [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16], [0, 32]], [], [rows, 64])


@gluon.jit
def _bias(bias_ptr, matrix, out, outs, LARGER: gl.constexpr):
    bias = gl.load(bias_ptr + matrix * outs + out, mask=out < outs, other=0.0)
    return bias.to(gl.float32) * (1.0 / LARGER)


@gluon.jit
def _store(result, out_ptr, target, inside, first_out, outs, stored: gl.constexpr):
    out = first_out + gl.arange(0, PART, gl.SliceLayout(0, stored))
    gl.store(
        out_ptr + target.to(gl.int64)[:, None] * outs + out[None, :],
        gl.convert_layout(result.permute((1, 0)), stored),
        mask=inside[:, None] & (out < outs)[None, :],
    )


@gluon.jit
def _multiply_item(
    ring,
    found,
    slots_ptr,
    bias_ptr,
    out_ptr,
    outs,
    steps,
    count,
    GATHERS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    LARGER: gl.constexpr,
    WARPGROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Multiplies the rows of an item with both parts of a warpgroup, and stores them. Returns the number of
    the next step's turn."""
    x_smem, words_smem, scales_smem, full, free = ring
    expert, first, end, first_out = found
    dtype: gl.constexpr = x_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    stored: gl.constexpr = _stored_layout(BLOCK_T)
    sums = gl.zeros([PART, BLOCK_T], gl.float32, mma)
    up = gl.zeros([PART, BLOCK_T], gl.float32, mma)
    if bias_ptr is not None:
        out = first_out + gl.arange(0, PART, gl.SliceLayout(1, mma))
        sums += _bias(bias_ptr, expert * (1 + GATED), out, outs, LARGER)[:, None]
        up += _bias(bias_ptr, expert * (1 + GATED) + GATED, out + PART * (1 - GATED), outs, LARGER)[:, None]
    for step in range(gl.cdiv(steps, DEPTH)):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        fence_async_shared()  # Tensor cores see what threads copied.
        place = 2 * (stage * DEPTH * WARPGROUPS + WARPGROUP)
        packed = _load_part(words_smem, scales_smem, place)
        for i in gl.static_range(DEPTH):
            rows = x_smem.index(stage * DEPTH + i).permute((1, 0))
            weights = _operand(packed, dtype, mma)
            packed = _load_part(words_smem, scales_smem, place + 1)
            sums = warpgroup_mma(weights, rows, sums, is_async=True)
            sums, up = warpgroup_mma_wait(1, deps=[sums, up])
            if i == 0:  # The stage before is free again.
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
            weights = _operand(packed, dtype, mma)
            place += 2 * WARPGROUPS
            if i + 1 < DEPTH:
                packed = _load_part(words_smem, scales_smem, place)
            up = warpgroup_mma(weights, rows, up, is_async=True)
            sums, up = warpgroup_mma_wait(1, deps=[sums, up])
        count += 1
    sums, up = warpgroup_mma_wait(0, deps=[sums, up])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))

    row = gl.arange(0, BLOCK_T, gl.SliceLayout(1, stored))
    inside = first + row < end
    target = first + row
    if not GATHERS:
        target = gl.load(slots_ptr + target, mask=inside, other=0)
    sums *= LARGER
    up *= LARGER
    if GATED:
        result = gate_mul(sums, up, ACTIVATION, dtype, ALPHA, LIMIT)
        _store(result, out_ptr, target, inside, first_out, outs, stored)
    else:
        result, second = sums.to(dtype), up.to(dtype)
        if ACTIVATION == "relu2":
            result, second = squared_relu(result), squared_relu(second)
        _store(result, out_ptr, target, inside, first_out, outs, stored)
        _store(second, out_ptr, target, inside, first_out + PART, outs, stored)
    return count


@gluon.jit
def _multiply(
    ring,
    listed,
    slots_ptr,
    bias_ptr,
    out_ptr,
    outs,
    steps,
    GATHERS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    LARGER: gl.constexpr,
    WARPGROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """The work of a warpgroup, on its part of each tile's outputs."""
    _x_smem, _words_smem, _scales_smem, full, free = ring
    _tiles_ptr, row_tiles, out_tiles = listed
    OUTS: gl.constexpr = 2 * PART // (1 + GATED)
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        expert, first, end, out_tile = _item(item, listed)
        first_out = (out_tile * WARPGROUPS + WARPGROUP) * OUTS
        if first_out >= outs:
            for _ in range(gl.cdiv(steps, DEPTH)):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                mbarrier.arrive(free.index(stage))
                count += 1
        else:
            count = _multiply_item(
                ring,
                (expert, first, end, first_out),
                slots_ptr,
                bias_ptr,
                out_ptr,
                outs,
                steps,
                count,
                GATHERS,
                GATED,
                ACTIVATION,
                ALPHA,
                LIMIT,
                LARGER,
                WARPGROUP,
                BLOCK_T,
                STAGES,
                EVEN,
            )


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_mxfp4_experts_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    slots_ptr,
    outs,
    inputs,
    num_tiles,
    K: gl.constexpr,
    GATHERS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    LARGER: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    scales_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * DEPTH, BLOCK_T, BLOCK_I], x_layout)
    words_smem = gl.allocate_shared_memory(gl.int32, [2 * WARPGROUPS * STAGES * DEPTH, 4, 8, 4, 4], in_order)
    scales_smem = gl.allocate_shared_memory(
        gl.int32, [2 * WARPGROUPS * STAGES * DEPTH, 4, 2, 8], scales_order
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # Each of the threads that copy arrives.
        mbarrier.init(free.index(i), count=WARPGROUPS)
    steps = gl.cdiv(inputs, BLOCK_I)
    ring = x_smem, words_smem, scales_smem, full, free
    out_tiles = gl.cdiv(outs, WARPGROUPS * (2 * PART // (1 + GATED)))
    listed = tiles_ptr, gl.load(tiles_ptr + num_tiles * 3), out_tiles
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    ring,
                    listed,
                    slots_ptr,
                    bias_ptr,
                    out_ptr,
                    outs,
                    steps,
                    GATHERS,
                    GATED,
                    ACTIVATION,
                    ALPHA,
                    LIMIT,
                    LARGER,
                    0,
                    BLOCK_T,
                    STAGES,
                    EVEN,
                ),
            ),
            (
                _multiply,
                (
                    ring,
                    listed,
                    slots_ptr,
                    bias_ptr,
                    out_ptr,
                    outs,
                    steps,
                    GATHERS,
                    GATED,
                    ACTIVATION,
                    ALPHA,
                    LIMIT,
                    LARGER,
                    1,
                    BLOCK_T,
                    STAGES,
                    EVEN,
                ),
            ),
            (
                _fetch,
                (
                    ring,
                    listed,
                    slots_ptr,
                    x_ptr,
                    words_ptr,
                    scales_ptr,
                    outs,
                    inputs,
                    K,
                    GATHERS,
                    GATED,
                    BLOCK_T,
                    STAGES,
                    EVEN,
                ),
            ),
        ],
        [4, 4],
        [184, 136],
    )  # warps, and registers a thread, of all but the first


def mxfp4_experts_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias_EO: torch.Tensor | None,
    out: torch.Tensor,
    rows: RowMap,
    block_rows: int,
    activation: Activation | None = None,
) -> None:
    """The matmul of LISTED rows in tiles of `block_rows`, 32 or 64. With an activation it is the first one,
    which gathers tokens' rows, otherwise the second one, which scatters to slots. Bits do not depend on
    timing."""
    inputs, outs, gated = x.shape[1], out.shape[1], activation is not None and activation.has_gate
    assert isinstance(weight, TiledWeight) and rows.slots is not None
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == weight.dtype
    assert weight.e2m1 and weight.group == 32 and weight.minima is None
    assert weight.shape == (rows.num_experts * outs * (1 + gated), inputs)
    assert outs % 16 == inputs % 8 == 0
    assert bias_EO is None or (bias_EO.is_contiguous() and bias_EO.numel() == weight.shape[0])
    packed_bytes = 4 * 8 * (STEP_WORDS.value + STEP_SCALES.value)  # a warpgroup's 8 tiles of 16 outputs
    step_bytes = WARPGROUPS.value * packed_bytes + block_rows * BLOCK_I.value * x.itemsize
    programs = rows.num_blocks * cdiv(outs, WARPGROUPS.value * 2 * PART.value // (1 + gated))
    hopper_mxfp4_experts_kernel[(min(dispatch.gpu_of(x.device).sms, programs),)](
        x,
        weight.words,
        weight.scales,
        bias_EO,
        out,
        rows.map,
        rows.slots,
        outs,
        inputs,
        rows.num_blocks,
        K=rows.top_k,
        GATHERS=activation is not None,
        GATED=gated,
        ACTIVATION=activation.kind if activation else "",
        ALPHA=activation.alpha if activation else 1.0,
        LIMIT=activation.limit if activation else 0.0,
        LARGER=2.0 ** SMALLER[x.dtype],
        BLOCK_T=block_rows,
        STAGES=dispatch.SHARED_BYTES // (step_bytes * DEPTH.value),
        EVEN=inputs % (DEPTH.value * BLOCK_I.value) == 0,
        num_warps=4,
        maxnreg=168,
    )
