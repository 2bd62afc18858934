"""The two matmuls of experts with many rows on Hopper, in Gluon.

Rows are a list of slots, which is sorted by experts and cut into tiles of 128 (moe.py). The first matmul
gathers the rows of the slots' tokens, ends with the activation, and writes in the list's order. The second
one reads in that order and scatters to slots.

As in hopper_gated.py, programs stay on their SMs and go from tile to tile, a producer keeps the tiles of
inputs ahead of them, and two warpgroups of 64 rows share each tile of the weight, gate and up as one matmul.
TMA sees the experts as the rows of one weight. Tokens' rows are not beside each other, so four producer warps
copy them, 16 bytes a thread. A tile's rows beyond its expert's last one are multiplied and not stored. A
warpgroup all of whose rows are beyond it multiplies nothing. A tile of outputs has 256 weight rows, or 320 if
less of the last tile is beyond the expert's: 2,880 outputs are 9 tiles of 320, and 11 and a quarter of 256.

Tiles are taken in bands of 4 tiles of rows, so that what runs side by side reads few rows and weights, from
the L2 cache.

Figures are in benchmarks/results/matmul.md. E experts · I inputs · O outputs (F of a gated matmul, whose
weight has 2F rows an expert). The oracle is moe/reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import descriptor, gate_mul, squared_relu
from shoal.kernels.matmul.tile_matmul import RowMap, Weight, weight_shape
from shoal.kernels.rounding import cdiv
from shoal.kinds.experts import Activation

ROWS: gl.constexpr = gl.constexpr(64)  # rows of a warpgroup
BLOCK_O: gl.constexpr = gl.constexpr(128)  # weight rows of a copy: a tile's gate or up, or half its outputs
MORE_O: gl.constexpr = gl.constexpr(32)  # weight rows of a copy that makes a tile wider
BLOCK_I: gl.constexpr = gl.constexpr(64)  # 128 bytes, which tensor cores and TMA swizzle as one row
STAGES: gl.constexpr = gl.constexpr(4)
BAND: gl.constexpr = gl.constexpr(4)


@gluon.jit
def _tile(item, listed):
    """Returns an item's expert, where its rows start and the expert's end in the list, and its tile of
    outputs."""
    tiles_ptr, row_tiles, out_tiles = listed
    first = item // (BAND * out_tiles) * BAND
    height = gl.minimum(row_tiles - first, BAND)
    within = item % (BAND * out_tiles)
    tile_ptr = tiles_ptr + (first + within % height) * 3
    return gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), within // height


@gluon.jit
def _fetch(work, read, weight_desc, more_desc, K: gl.constexpr, GATHERS: gl.constexpr, GATED: gl.constexpr):
    """The work of the producer warps."""
    ring, listed, slots_ptr = work
    x_smem, weight_smem, more_smem, full, free = ring
    x_desc, x_ptr, outs, inputs = read
    _tiles_ptr, row_tiles, out_tiles = listed
    X_BYTES: gl.constexpr = 0 if GATHERS else 2 * x_desc.block_type.nbytes
    HAS_MORE: gl.constexpr = more_desc is not None
    MORE_BYTES: gl.constexpr = 2 * more_desc.block_type.nbytes if HAS_MORE else 0
    BYTES: gl.constexpr = X_BYTES + 2 * weight_desc.block_type.nbytes + MORE_BYTES
    WIDE: gl.constexpr = BLOCK_O if GATED else 2 * BLOCK_O
    ALL_WIDE: gl.constexpr = WIDE + HAS_MORE * WIDE * MORE_O // BLOCK_O
    # weight rows between the two copies of a part of a tile
    to_second = outs if GATED else BLOCK_O
    to_second_more = outs if GATED else MORE_O
    if GATHERS:
        rows_smem = x_smem._reinterpret(x_smem.dtype, [STAGES, 2 * ROWS, BLOCK_I], x_smem.layout)
        copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        row = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, copied))
        at = gl.arange(0, BLOCK_I, gl.SliceLayout(0, copied))
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        expert, first, end, out_tile = _tile(item, listed)
        out = expert * (outs * (1 + GATED)) + out_tile * ALL_WIDE
        if GATHERS:
            inside = first + row < end
            token = gl.load(slots_ptr + first + row, mask=inside, other=0) // K
            x_ptrs = x_ptr + token.to(gl.int64)[:, None] * inputs + at[None, :]
        for column in range(0, inputs, BLOCK_I):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [out + half * to_second, column],
                    full.index(stage),
                    weight_smem.index(2 * stage + half),
                )
                if HAS_MORE:
                    tma.async_copy_global_to_shared(
                        more_desc,
                        [out + WIDE + half * to_second_more, column],
                        full.index(stage),
                        more_smem.index(2 * stage + half),
                    )
                if not GATHERS:
                    tma.async_copy_global_to_shared(
                        x_desc,
                        [first + half * ROWS, column],
                        full.index(stage),
                        x_smem.index(2 * stage + half),
                    )
            if GATHERS:
                async_copy.async_copy_global_to_shared(
                    rows_smem.index(stage), x_ptrs + column, mask=inside[:, None]
                )
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            count += 1


@gluon.constexpr_function
def _stored_layout(wide):
    """8 bytes of a row a thread, and 32 of the same row beside them. A warp has rows of its own sums, and its
    lanes exchange them in pairs, which needs no shared memory."""
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, 1 << i] for i in range(4, wide.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, wide])


@gluon.jit
def _first_sums(bias_ptr, expert, first_out, outs, WEIGHT_ROWS: gl.constexpr, GATED: gl.constexpr):
    """Returns the sums of a part of a tile before the matmul: the bias of its weight rows. `first_out`: of a
    gated part, its first output of gate and of up."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WEIGHT_ROWS, 16])
    WIDE: gl.constexpr = WEIGHT_ROWS // (1 + GATED)
    sums = gl.zeros([ROWS, WEIGHT_ROWS], gl.float32, mma)
    if bias_ptr is not None:
        at = gl.arange(0, WEIGHT_ROWS, gl.SliceLayout(0, mma))
        out = first_out + at % WIDE
        place = (expert * (1 + GATED) + at // WIDE) * outs + out
        bias = gl.load(bias_ptr + place, mask=out < outs, other=0.0)
        sums += bias.to(gl.float32)[None, :]
    return sums


@gluon.jit
def _store(
    sums,
    out_ptr,
    target,
    inside,
    first_out,
    outs,
    dtype: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Applies the activation to a part of a tile, and stores it in the rows of `target`."""
    WIDE: gl.constexpr = sums.shape[1] // (1 + GATED)
    stored: gl.constexpr = _stored_layout(WIDE)
    if GATED:
        gate, up = gl.split(sums.reshape((ROWS, 2, WIDE)).permute((0, 2, 1)))
        result = gate_mul(gate, up, ACTIVATION, dtype, ALPHA, LIMIT)
    else:
        result = sums.to(dtype)
        if ACTIVATION == "relu2":
            result = squared_relu(result)
    target = gl.convert_layout(target, gl.SliceLayout(1, stored), assert_trivial=True)
    inside = gl.convert_layout(inside, gl.SliceLayout(1, stored), assert_trivial=True)
    out = first_out + gl.arange(0, WIDE, gl.SliceLayout(0, stored))
    gl.store(
        out_ptr + target.to(gl.int64)[:, None] * outs + out[None, :],
        gl.convert_layout(result, stored),
        mask=inside[:, None] & (out < outs)[None, :],
    )


@gluon.jit
def _multiply(
    work,
    written,
    bias_ptr,
    GATHERS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    HAS_MORE: gl.constexpr,
    HALF: gl.constexpr,
):
    """The work of a warpgroup, on half of each tile's rows."""
    ring, listed, slots_ptr = work
    x_smem, weight_smem, more_smem, full, free = ring
    out_ptr, outs, steps = written
    _tiles_ptr, row_tiles, out_tiles = listed
    WIDE: gl.constexpr = BLOCK_O if GATED else 2 * BLOCK_O
    ALL_WIDE: gl.constexpr = WIDE + HAS_MORE * WIDE * MORE_O // BLOCK_O
    stored: gl.constexpr = _stored_layout(WIDE)
    dtype: gl.constexpr = x_smem.dtype
    weights = weight_smem._reinterpret(dtype, [STAGES, 2 * BLOCK_O, BLOCK_I], weight_smem.layout)
    more_weights = weights
    if HAS_MORE:
        more_weights = more_smem._reinterpret(dtype, [STAGES, 2 * MORE_O, BLOCK_I], more_smem.layout)
    row = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    count = 0
    for item in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        expert, first, end, out_tile = _tile(item, listed)
        if first + HALF * ROWS < end:
            inside = first + row < end
            target = first + row
            if not GATHERS:
                target = gl.load(slots_ptr + target, mask=inside, other=0)
            out = out_tile * ALL_WIDE
            sums = _first_sums(bias_ptr, expert, out, outs, 2 * BLOCK_O, GATED)
            if HAS_MORE:
                more = _first_sums(bias_ptr, expert, out + WIDE, outs, 2 * MORE_O, GATED)
            for step in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                if GATHERS:
                    fence_async_shared()  # Tensor cores see what threads copied.
                x = x_smem.index(2 * stage + HALF)
                sums = warpgroup_mma(x, weights.index(stage).permute((1, 0)), sums, is_async=True)
                if HAS_MORE:
                    more = warpgroup_mma(x, more_weights.index(stage).permute((1, 0)), more, is_async=True)
                    sums, more = warpgroup_mma_wait(2, deps=[sums, more])
                else:
                    sums = warpgroup_mma_wait(1, deps=[sums])
                # The stage before is free again.
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            if HAS_MORE:
                sums, more = warpgroup_mma_wait(0, deps=[sums, more])
            else:
                sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
            _store(sums, out_ptr, target, inside, out, outs, dtype, GATED, ACTIVATION, ALPHA, LIMIT)
            if HAS_MORE:
                _store(
                    more, out_ptr, target, inside, out + WIDE, outs, dtype, GATED, ACTIVATION, ALPHA, LIMIT
                )
        else:
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                mbarrier.arrive(free.index(stage))
                count += 1


@gluon.jit(do_not_specialize=["num_tiles"])
def hopper_experts_kernel(
    x_desc,
    x_ptr,
    weight_desc,
    more_desc,
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
):
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_I], x_desc.layout)
    weight_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_O, BLOCK_I], x_desc.layout)
    HAS_MORE: gl.constexpr = more_desc is not None
    more_smem = weight_smem
    if HAS_MORE:
        more_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, MORE_O, BLOCK_I], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Each of 128 threads that copy rows arrives, and one for TMA.
        mbarrier.init(full.index(i), count=129 if GATHERS else 1)
        mbarrier.init(free.index(i), count=2)
    steps = gl.cdiv(inputs, BLOCK_I)
    ring = x_smem, weight_smem, more_smem, full, free
    out_tiles = gl.cdiv(outs, (BLOCK_O + HAS_MORE * MORE_O) * (2 - GATED))
    listed = tiles_ptr, gl.load(tiles_ptr + num_tiles * 3), out_tiles
    WARPS: gl.constexpr = 4 if GATHERS else 1
    REGISTERS: gl.constexpr = 216 if GATHERS else 232
    work, written = (ring, listed, slots_ptr), (out_ptr, outs, steps)
    read = x_desc, x_ptr, outs, inputs
    gl.warp_specialize(
        [
            (_multiply, (work, written, bias_ptr, GATHERS, GATED, ACTIVATION, ALPHA, LIMIT, HAS_MORE, 0)),
            (_multiply, (work, written, bias_ptr, GATHERS, GATED, ACTIVATION, ALPHA, LIMIT, HAS_MORE, 1)),
            (_fetch, (work, read, weight_desc, more_desc, K, GATHERS, GATED)),
        ],
        [4, WARPS],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # warps, and registers a thread, of all but the first


def hopper_experts_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias_EO: torch.Tensor | None,
    out: torch.Tensor,
    rows: RowMap,
    activation: Activation | None = None,
) -> None:
    """The matmul of LISTED rows in tiles of 128. With an activation it is the first one, which gathers
    tokens' rows, otherwise the second one, which scatters to slots. Bits do not depend on timing."""
    assert isinstance(weight, torch.Tensor) and weight.is_contiguous()
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == weight.dtype
    assert rows.slots is not None
    inputs, outs, gated = x.shape[1], out.shape[1], activation is not None and activation.has_gate
    assert weight_shape(weight) == (rows.num_experts * outs * (1 + gated), inputs)
    assert activation is None or inputs % BLOCK_I.value == 0
    wide, more_desc = BLOCK_O.value * (2 - gated), None
    wider = wide + MORE_O.value * (2 - gated)
    if cdiv(outs, wider) * wider < cdiv(outs, wide) * wide:
        more_desc, wide = descriptor(weight.flatten(0, 1), MORE_O.value, BLOCK_I.value), wider
    assert bias_EO is None or (bias_EO.is_contiguous() and bias_EO.numel() == weight_shape(weight)[0])
    programs = rows.num_blocks * cdiv(outs, wide)
    hopper_experts_kernel[(min(dispatch.gpu_of(x.device).sms, programs),)](
        descriptor(x, ROWS.value, BLOCK_I.value),
        x,
        descriptor(weight.flatten(0, 1), BLOCK_O.value, BLOCK_I.value),
        more_desc,
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
        num_warps=4,
        maxnreg=168,
    )
