"""Matmuls of one row with a large weight on Hopper, with RMSNorm before and bias, SiLU * up or the residual
after, in Gluon.

Such a matmul is the reading of its weight. Time is lost when nothing is read: while a kernel waits for the
one before, while it sums, and while it ends. So a program stays on its SM and goes through strips of weight
rows, one row a warp, with a ring of tiles in shared memory that are on their way. They are asked for before
the row of inputs is there (pdl.py), and each tile that has been used makes place for a later one.

The ring takes more than half of an SM's memory, so that an SM has one such program. The next matmul's
program begins when this one ends, and fills its ring while others still work. With smaller rings the next
matmul's programs came early and in pairs, to half of the SMs, which was slower.

Each program normalises the row, rounds it as the norm's own kernel does, and keeps it in shared memory.
Figures are in benchmarks/results/matmul.md; the weights of the smallest models are too small for this
kernel. I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import gate_mul, wait_for_inputs
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2

OUTS: gl.constexpr = gl.constexpr(8)  # outputs of a strip, one a warp
PART: gl.constexpr = gl.constexpr(256)  # inputs that a warp reads at once, 16 bytes a thread
PARTS: gl.constexpr = gl.constexpr(4)  # parts of a tile, which is 16 KB of weights
# Tiles in the ring. A gated matmul has half as many places, each for a tile of gate and one of up.
STAGES: gl.constexpr = gl.constexpr(8)
EARLY: gl.constexpr = gl.constexpr(6)  # tiles requested before the row is there, as in hopper_fp8_row.py


@gluon.jit
def _request(
    i, weight_ptr, weight_smem, up_smem, O, I, k_tiles, tiles, GATED: gl.constexpr, EVEN: gl.constexpr
):
    """Requests tile i of this program: a k-tile of a strip of outputs, part after part."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [OUTS, 1], [1, 0])
    row = gl.arange(0, PARTS * OUTS, gl.SliceLayout(1, layout))
    out = (gl.program_id(0) + i // k_tiles * gl.num_programs(0)) * OUTS + row % OUTS
    column = (i % k_tiles * PARTS + row // OUTS)[:, None] * PART + gl.arange(
        0, PART, gl.SliceLayout(0, layout)
    )[None, :]
    inside = (out < O)[:, None] & (i < tiles)
    if not EVEN:
        inside = inside & (column < I)
    ptrs, stage = weight_ptr + out.to(gl.int64)[:, None] * I + column, i % weight_smem.shape[0]
    async_copy.async_copy_global_to_shared(weight_smem.index(stage), ptrs, mask=inside)
    if GATED:
        async_copy.async_copy_global_to_shared(up_smem.index(stage), ptrs + O.to(gl.int64) * I, mask=inside)
    async_copy.commit_group()


@gluon.jit
def row_epilogue(result, up, bias_ptr, out, O, dtype: gl.constexpr, GATED: gl.constexpr):
    """Returns the matmul's outputs: its sums with the bias, or silu of them times the sums of up, rounded."""
    if bias_ptr is not None:
        result += gl.load(bias_ptr + out, mask=out < O, other=0.0).to(gl.float32)
        if GATED:
            up += gl.load(bias_ptr + O + out, mask=out < O, other=0.0).to(gl.float32)
    return gate_mul(result, up, "silu", dtype) if GATED else result.to(dtype)


@gluon.jit
def hopper_row_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    k_tiles,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    EVEN: gl.constexpr,
    BLOCK_X: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes strips of outputs, `k_tiles` tiles each: this program's first, then each one that lies a grid
    further. EVEN: all tiles are whole. BLOCK_X >= I."""
    gl.static_assert(num_warps == OUTS)
    DTYPE: gl.constexpr = weight_ptr.dtype.element_ty
    RING: gl.constexpr = STAGES // (1 + GATED)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])  # output, input
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weight_smem = gl.allocate_shared_memory(DTYPE, [RING, PARTS * OUTS, PART], plain)
    weights = weight_smem._reinterpret(DTYPE, [RING * PARTS, OUTS, PART], plain)
    up_smem, up_weights = weight_smem, weights
    if GATED:
        up_smem = gl.allocate_shared_memory(DTYPE, [RING, PARTS * OUTS, PART], plain)
        up_weights = up_smem._reinterpret(DTYPE, [RING * PARTS, OUTS, PART], plain)
    x_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_X], line)
    xs = x_smem._reinterpret(DTYPE, [BLOCK_X // PART, PART], line)

    mine = gl.cdiv(gl.cdiv(O, OUTS) - gl.program_id(0), gl.num_programs(0))
    tiles = mine * k_tiles
    for i in gl.static_range(EARLY // (1 + GATED)):
        _request(i, weight_ptr, weight_smem, up_smem, O, I, k_tiles, tiles, GATED, EVEN)
    at = gl.arange(0, BLOCK_X, gl.BlockedLayout([8], [32], [num_warps], [0]))
    if norm_ptr is not None:
        norm = gl.load(norm_ptr + at, mask=at < I, other=0.0)
    wait_for_inputs(PDL)
    x = gl.load(x_ptr + at, mask=at < I, other=0.0)
    for i in gl.static_range(EARLY // (1 + GATED), RING):
        _request(i, weight_ptr, weight_smem, up_smem, O, I, k_tiles, tiles, GATED, EVEN)
    if norm_ptr is not None:
        x32 = x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(x32 * x32, axis=0) / I + eps)
        x = ((x32 * scale).to(norm.dtype).to(gl.float32) * norm.to(gl.float32)).to(DTYPE)
    x_smem.store(x)

    column = gl.arange(0, PART, gl.SliceLayout(0, layout))[None, :]
    i = 0
    for strip in range(mine):
        out = (gl.program_id(0) + strip * gl.num_programs(0)) * OUTS + gl.arange(
            0, OUTS, gl.SliceLayout(1, layout)
        )
        if ADD:
            before = gl.load(out_ptr + out, mask=out < O, other=0.0)
        sums = gl.zeros([OUTS, PART], gl.float32, layout)
        up_sums = gl.zeros([OUTS, PART], gl.float32, layout)
        for k_tile in range(k_tiles):
            async_copy.wait_group(RING - 1)  # Each tile has a commit group, also those beyond the last.
            for part in gl.static_range(PARTS):
                place, of_row = i % RING * PARTS + part, k_tile * PARTS + part
                some = xs.index(of_row).load(gl.SliceLayout(0, layout)).to(gl.float32)[None, :]
                product = weights.index(place).load(layout).to(gl.float32) * some
                up_product = product
                if GATED:
                    up_product = up_weights.index(place).load(layout).to(gl.float32) * some
                if not EVEN:  # What was not copied need not be zeros.
                    product = gl.where(of_row * PART + column < I, product, 0.0)
                    up_product = gl.where(of_row * PART + column < I, up_product, 0.0)
                sums += product
                up_sums += up_product
            _request(i + RING, weight_ptr, weight_smem, up_smem, O, I, k_tiles, tiles, GATED, EVEN)
            i += 1
        result, up = gl.sum(sums, axis=1), gl.sum(up_sums, axis=1)
        result = row_epilogue(result, up, bias_ptr, out, O, DTYPE, GATED)
        if ADD:
            result = (before.to(gl.float32) + result.to(gl.float32)).to(DTYPE)
        gl.store(out_ptr + out, result, mask=out < O)
    async_copy.wait_group(0)  # The next program's ring lies in the same memory.


def hopper_row_matmul(
    x_1I: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual_1O: torch.Tensor | None = None,
    *,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_1O` in place, if there is one, which is then returned. With `norm_weight_I`, x is
    normalised first."""
    assert x_1I.is_contiguous() and weight.is_contiguous()
    inputs, outs = x_1I.shape[1], weight.shape[0] // (1 + gated)
    out_1O = x_1I.new_empty((1, outs)) if residual_1O is None else residual_1O
    assert out_1O.is_contiguous() and out_1O.shape == (1, outs) and out_1O.dtype == x_1I.dtype
    columns = PARTS.value * PART.value
    hopper_row_kernel[(min(dispatch.gpu_of(x_1I.device).sms, cdiv(outs, OUTS.value)),)](
        x_1I,
        norm_weight_I,
        weight,
        bias,
        out_1O,
        eps,
        outs,
        inputs,
        cdiv(inputs, columns),
        GATED=gated,
        ADD=residual_1O is not None,
        EVEN=inputs % columns == 0,
        BLOCK_X=max(columns, next_power_of_2(inputs)),
        num_warps=OUTS.value,
        **pdl_options(),
    )
    return out_1O
