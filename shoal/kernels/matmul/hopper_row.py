"""Matmuls of one row with a large weight on Hopper, with RMSNorm before and bias, SiLU * up or the residual
after, in Gluon. One kernel has all formats: hopper_row_loaders.py says how each is read and multiplied.

Such a matmul is the reading of its weight. Time is lost when nothing is read: while a kernel waits for the
one before, while it sums, and while it ends. So a program stays on its SM and goes through strips of weight
rows, with a ring of tiles in shared memory that are on their way. They are asked for before the row of inputs
is there (pdl.py), and each tile that has been used makes place for a later one.

With 16 bits and fp8 the ring takes more than half of an SM's memory, so that an SM has one such program. The
next matmul's program begins when this one ends, and fills its ring while others still work. With smaller
rings the next matmul's programs came early and in pairs, to half of the SMs, which was slower.

Each program normalises the row, rounds it as the norm's own kernel does, and keeps it in shared memory.
Figures are in benchmarks/results/matmul.md; the weights of the smallest models are too small for this
kernel. I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py, and
of weights in fewer bits the matmul with the unpacked matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.kernels.hopper import barrier, empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.hopper_linear import gate_mul, wait_for_inputs
from shoal.kernels.matmul.hopper_row_loaders import TILE, Fp8Loader, Int4Loader, PlainLoader
from shoal.kernels.matmul.loaders import Fp8Matrix, TiledWeight
from shoal.kernels.matmul.tile_matmul import Weight
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2

SWIZZLED = gl.NVMMASharedLayout(128, 8, rank=3)  # weights as the tensor cores read them
PLAIN_ROWS = gl.NVMMASharedLayout(0, 32)  # words and scales as they lie


class Ring(NamedTuple):
    """`stages`: the ring's tiles; a gated matmul has half as many places, each for a tile of gate and one of
    up. `early`: tiles requested before the row is there. The row would have to wait behind more of them, and
    so would what the kernels before still read. `programs`: that an SM has at once."""

    format: str
    outs: int
    warps: int
    stages: int
    early: int
    programs: int


PLAIN = Ring("plain", outs=8, warps=8, stages=8, early=6, programs=1)  # tiles of 16 KB
FP8 = Ring("fp8", outs=16, warps=8, stages=8, early=4, programs=1)  # tiles of 16 KB
# Tiles of 8 KB. One of three programs multiplies while others make operands.
INT4 = Ring("int4", outs=16, warps=4, stages=6, early=2, programs=3)


@gluon.jit
def _following(number, carried, count, step):
    """The number after this one, which is 0 again after `count` of them, and then `step` more are carried."""
    over = (number + 1 == count).to(gl.int32)
    return number + 1 - over * count, carried + over * step


@gluon.jit
def _used_from_here(x):
    """Returns x, numbers of 16 bits that depend on the clock's highest bit, which is always 0. Otherwise the
    compiler converts them before it requests tiles, which then wait for the row."""
    zero = gl.inline_asm_elementwise(
        "{ .reg .b64 t; mov.u64 t, %clock64; shr.u64 t, t, 63; cvt.u16.u64 $0, t; }",
        "=h",
        [],
        dtype=gl.int16,
        is_pure=False,
        pack=1,
    )
    zeros = gl.full(x.shape, 0, gl.int16, x.type.layout) + zero
    return gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zeros], x.dtype, True, 2)


@gluon.jit
def _normed(x, norm, I, eps, dtype: gl.constexpr):
    """RMSNorm of a row in float32, rounded where the norm's own kernel rounds."""
    scale = gl.rsqrt(gl.sum(x * x) / I + eps)
    return ((x * scale).to(norm.dtype).to(gl.float32) * norm.to(gl.float32)).to(dtype).to(gl.float32)


@gluon.jit
def _end(result, up, bias_ptr, out, O, dtype: gl.constexpr, GATED: gl.constexpr):
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
    weight,
    scales,
    minima,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    FORMAT: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    EVEN: gl.constexpr,
    OUTS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    BLOCK_X: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Computes strips of OUTS outputs: this program's first, then each one that lies a grid further. EVEN:
    all tiles are whole. BLOCK_X >= I."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    PLACES: gl.constexpr = STAGES // (1 + GATED)
    if FORMAT == "plain":
        loader = PlainLoader.create(weight, scales, minima, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X)
    elif FORMAT == "fp8":
        loader = Fp8Loader.create(weight, scales, minima, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X)
    else:
        loader = Int4Loader.create(weight, scales, minima, O, I, GATED, EVEN, OUTS, STAGES, BLOCK_X)
    k_tiles, step = gl.cdiv(I, TILE), gl.num_programs(0)
    next_k_tile, next_strip = 0, gl.program_id(0)
    for stage in range(EARLY // (1 + GATED)):
        loader.request(stage, next_strip, next_k_tile)
        next_k_tile, next_strip = _following(next_k_tile, next_strip, k_tiles, step)

    at = loader.order()
    if norm_ptr is not None:
        norm = gl.load(norm_ptr + at, mask=at < I, other=0.0)
    wait_for_inputs(PDL)
    x = gl.load(x_ptr + at, mask=at < I, other=0.0)
    for stage in range(EARLY // (1 + GATED), PLACES):
        loader.request(stage, next_strip, next_k_tile)
        next_k_tile, next_strip = _following(next_k_tile, next_strip, k_tiles, step)
    x = _used_from_here(x).to(gl.float32)
    if norm_ptr is not None:
        x = _normed(x, norm, I, eps, DTYPE)
    smaller = loader.put_row(x)

    stage, turn = 0, 0
    for strip in range(gl.program_id(0), gl.cdiv(O, OUTS), step):
        out, factor, up_factor, sums = loader.start(strip)
        up_sums = sums
        if ADD:
            before = gl.load(out_ptr + out, mask=out < O, other=0.0)
        for k_tile in range(k_tiles):
            loader.wait(stage, turn)
            sums, up_sums = loader.multiply(stage, k_tile, sums, up_sums)
            barrier()  # All warps have read the tile.
            loader.request(stage, next_strip, next_k_tile)
            next_k_tile, next_strip = _following(next_k_tile, next_strip, k_tiles, step)
            stage, turn = _following(stage, turn, PLACES, 1)
        result = loader.total(sums) * smaller * factor
        up = result
        if GATED:
            up = loader.total(up_sums) * smaller * up_factor
        result = _end(result, up, bias_ptr, out, O, DTYPE, GATED)
        if ADD:
            result = (before.to(gl.float32) + result.to(gl.float32)).to(DTYPE)
        gl.store(out_ptr + out, result, mask=out < O)
    loader.end()


def hopper_row_matmul(
    x_1I: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_1O: torch.Tensor | None = None,
    *,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_1O` in place, if there is one, which is then returned. With `norm_weight_I`, x is
    normalised first. dispatch.py says which weights a ring takes."""
    inputs = x_1I.shape[1]
    operands: tuple[torch.Tensor | TensorDescriptor | None, ...]
    if isinstance(weight, torch.Tensor):
        assert weight.is_contiguous()
        ring, (rows, columns), operands = PLAIN, weight.shape, (weight, None, None)
    elif isinstance(weight, Fp8Matrix):
        ring, (rows, columns), operands = FP8, weight.data.shape, _described_fp8(weight)
    else:
        ring, (rows, columns), operands = INT4, weight.shape, _described_int4(weight)
    outs, even = rows // (1 + gated), inputs % TILE.value == 0
    assert x_1I.is_contiguous() and columns == inputs
    assert ring is not INT4 or (even and (not gated or outs % INT4.outs == 0))
    out_1O = empty_matmul_input(x_1I, 1, outs) if residual_1O is None else residual_1O
    assert out_1O.is_contiguous() and out_1O.shape == (1, outs) and out_1O.dtype == x_1I.dtype
    programs = min(ring.programs * dispatch.gpu_of(x_1I.device).sms, cdiv(outs, ring.outs))
    hopper_row_kernel[(programs,)](
        x_1I,
        norm_weight_I,
        *operands,
        bias,
        out_1O,
        eps,
        outs,
        inputs,
        FORMAT=ring.format,
        GATED=gated,
        ADD=residual_1O is not None,
        EVEN=even,
        OUTS=ring.outs,
        STAGES=ring.stages,
        EARLY=ring.early,
        BLOCK_X=max(TILE.value, next_power_of_2(inputs)),
        num_warps=ring.warps,
        **pdl_options(),
    )
    return out_1O


def _described_fp8(matrix: Fp8Matrix) -> tuple[TensorDescriptor, torch.Tensor | TensorDescriptor, None]:
    """Tiles are 16 outputs by 8 slices of 128 inputs."""
    (rows, inputs), scales = matrix.data.shape, matrix.scales
    weight_desc = TensorDescriptor(
        matrix.data, [rows, inputs // 128, 128], [inputs, 128, 1], [16, 8, 128], SWIZZLED
    )
    return weight_desc, _described(scales, [8, 16]) if matrix.group else scales, None


def _described_int4(
    weight: TiledWeight,
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor | None]:
    """Tiles are 16 steps of 128 words, and 8 groups of 8 pairs of scales."""
    assert not weight.e2m1
    words, scales = weight.words.view(-1, 128), weight.scales.view(-1, 8)
    minima = None if weight.minima is None else _described(weight.minima.view(-1, 8), [8, 8])
    return _described(words, [16, 128]), _described(scales, [8, 8]), minima


def _described(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], block, PLAIN_ROWS)
