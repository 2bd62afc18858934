"""Loaders of weights for the tensor cores: how a tile of a weight gets from memory to the left operand of a
dot, one format each. A new format is a constant and a branch in each of these functions.

PLAIN    numbers of one type, [O, I] in memory, made the rows' type. Fp8 that does not lie in whole tiles
         is read so, too.
FP8      fp8 [O, I], of which a thread reads 16 bytes of two outputs at a time and feeds just these, so that
         nothing moves between threads. The inputs of a step are in an order of their own, the rows' too.
TILED    4 or 8 bits in the order of tensor cores (gpu_weight.py), a thread's 16 bytes at a time, with the
         scales, and minima, of groups of inputs.

In TILED, two numbers of 16 bits share a register, and no conversion is needed: the bits of a quant q of up to
8 bits, taken as they are, are the number q * 2^-133 in bf16 (2^-24 in fp16), mostly subnormal. So a pair of
weights costs a mask and a multiplication by a scale that makes up for it, with its minimum added in the same
instruction. That scale would be beyond the type's range if weights were not too small by a power of two
(SMALLER), which the sums make good. Scales of fp8 are applied to sums, which keeps its numbers exact.

A step is the inputs of one dot. I inputs · O outputs of one matrix (F of a gated one, which has 2F rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shoal.kernels.quant.widen import widened_words

PLAIN, FP8, TILED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FP8_STEP = 64  # inputs
# Weights of TILED in registers are too small by 2^this. It leaves room for scales up to 2^10 (1/2 in fp16).
SMALLER = {torch.bfloat16: 16, torch.float16: 7}
LARGER_BF16, LARGER_FP16 = (tl.constexpr(2.0**exponent) for exponent in SMALLER.values())
# The interpreter knows no assembler.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Fp8Matrix(NamedTuple):
    """data: float8_e4m3fn [O, I]. scales: float32 [G, O]. group: inputs that share a scale; 0: all."""

    data: torch.Tensor
    scales: torch.Tensor
    group: int


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A matrix of weights, [O, I], in the order of tensor cores (gpu_weight.py)."""

    shape: tuple[int, int]
    dtype: torch.dtype
    bits: int
    e2m1: bool
    group: int  # inputs that share a scale
    words: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None


@triton.jit
def first_ptrs(
    weight_ptr,
    scales_ptr,
    minima_ptr,
    matrix,
    block,
    O,
    I,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns the pointers of block `block` of BLOCK_O outputs of a matrix at its first step: to weights, to
    scales and to minima, and how far the weights and the scales of up are from these of gate. Outputs beyond
    the last are the last one (in tiles of 16: the last tile) again. `matrix`: its number, as int64."""
    minima_ptrs = scales_ptr
    if FORMAT == PLAIN:
        out = tl.minimum(block * BLOCK_O + tl.arange(0, BLOCK_O), O - 1)
        row = matrix * ((1 + GATED) * O) + out
        weight_ptrs = weight_ptr + row[:, None] * I + tl.arange(0, COLUMNS)[None, :]
        scales_ptrs = scales_ptr + row
        to_up, scales_to_up = tl.cast(O, tl.int64) * I, tl.cast(O, tl.int64)
    else:
        tile = block * (BLOCK_O // 16) + tl.arange(0, BLOCK_O // 16)
        tile = tl.minimum(tile, (O + 15) // 16 - 1)
        lane = tl.arange(0, 32)
        word = tl.arange(0, 4)[None, None, :]
        if FORMAT == FP8:
            first = matrix * ((1 + GATED) * O) + tile * 16
            weight_ptrs = weight_ptr + (first[:, None, None] + lane[None, :, None] // 4) * (I // 4)
            weight_ptrs += lane[None, :, None] % 4 * 4 + word
            out = tl.minimum(block * BLOCK_O + tl.arange(0, BLOCK_O), O - 1)
            scales_ptrs = scales_ptr + matrix * ((1 + GATED) * O) + out
            to_up, scales_to_up = tl.cast(O, tl.int64) * (I // 4), tl.cast(O, tl.int64)
        else:
            steps = tl.cdiv(I, COLUMNS)
            groups = num_groups(I, steps, SCALE_GROUP, COLUMNS)
            tile = matrix * ((1 + GATED) * (O // 16)) + tile
            weight_ptrs = weight_ptr + (tile * (steps * 128))[:, None, None] + lane[None, :, None] * 4 + word
            at = (tile * (groups * 8))[:, None] + lane[None, :] // 4
            scales_ptrs = scales_ptr + at
            minima_ptrs = scales_ptrs
            if minima_ptr is not None:
                minima_ptrs = minima_ptr + at
            to_up = tl.cast(O // 16, tl.int64) * (steps * 128)
            scales_to_up = tl.cast(O // 16, tl.int64) * (groups * 8)
    return weight_ptrs, scales_ptrs, minima_ptrs, to_up, scales_to_up


@triton.jit
def num_groups(I, steps, SCALE_GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """The groups of a matrix of TILED: those of its inputs, or of its whole steps."""
    if SCALE_GROUP >= COLUMNS:
        groups = tl.cdiv(I, SCALE_GROUP)
    else:
        groups = steps * (COLUMNS // SCALE_GROUP)
    return groups


@triton.jit
def rows_of_step(x_ptrs, start, inside, in_depth, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """The rows' inputs of a step, [COLUMNS, T]. Rows outside are 0, and inputs beyond the last one."""
    mask = inside[:, None] if EVEN else inside[:, None] & in_depth[None, :]
    x = tl.load(x_ptrs + start, mask=mask, other=0.0)
    if FORMAT == FP8:
        # A lane, 4 g + c, has outputs g and g + 8 and feeds inputs 8 u + 2 c + e of each 16. It has read
        # inputs 16 c to 16 c + 15, 4 from each word.
        ROWS: tl.constexpr = x.shape[0]
        x = tl.permute(tl.reshape(x, (ROWS, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # row, word, u, c, e
        x = tl.reshape(x, (ROWS, 64))
    return tl.trans(x)


@triton.jit
def weights_of_step(
    weight_ptrs,
    scales_ptrs,
    minima_ptrs,
    start,
    group,
    in_depth,
    I,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMA: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The weights of the step that begins at input `start`, [BLOCK_O, COLUMNS]. Not EVEN: numbers of PLAIN
    beyond the last input are 0; whatever else is read there meets zeros. `group`: the first one of TILED."""
    if FORMAT == PLAIN:
        if EVEN:
            weights = tl.load(weight_ptrs + start)
        else:
            weights = tl.load(weight_ptrs + start, mask=in_depth[None, :], other=0.0)
        weights = weights.to(DTYPE)
    elif FORMAT == FP8:
        TILES: tl.constexpr = weight_ptrs.shape[0]
        low = widened_words(tl.load(weight_ptrs + start // 4), DTYPE)
        high = widened_words(tl.load(weight_ptrs + start // 4 + 2 * I), DTYPE)  # outputs g + 8
        weights = tl.reshape(tl.join(low, high), (TILES, 8, 4, 4, 2, 2, 2))  # tile, g, c, word, u, e, h
        weights = tl.reshape(tl.permute(weights, (0, 6, 1, 3, 4, 2, 5)), (TILES * 16, 64))
    else:
        COLUMNS: tl.constexpr = 256 // BITS
        scales = _of_groups(scales_ptrs, group, SCALE_GROUP, COLUMNS)
        minima = _of_groups(minima_ptrs, group, SCALE_GROUP, COLUMNS) if MINIMA else scales
        words = tl.load(weight_ptrs + start * (128 // COLUMNS))
        weights = _weights(words, scales, minima, words.shape[0], BITS, E2M1, MINIMA, DTYPE)
    return weights


@triton.jit
def settled(sums):
    """The same sums, once the matmul that makes them has ended. It takes no instruction, but is a use of the
    sums, so Triton waits for wgmma before the next round. Else one goes on into the next round, where the
    registers of its left operand, widened weights, are written while it reads them
    (docs/decisions/matmul.md)."""
    if INTERPRETED:
        result = sums
    else:
        result = tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def number(bits, DTYPE: tl.constexpr):
    """The low 16 bits of an int32 as a number."""
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def fma(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of two numbers in each int32, rounded once."""
    if INTERPRETED:
        low = number(a, DTYPE).to(tl.float32) * number(b, DTYPE) + number(c, DTYPE)
        high = number(a >> 16, DTYPE).to(tl.float32) * number(b >> 16, DTYPE) + number(c >> 16, DTYPE)
        low, high = low.to(DTYPE).to(tl.int16, bitcast=True), high.to(DTYPE).to(tl.int16, bitcast=True)
        both = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        ASM: tl.constexpr = (
            "fma.rn.bf16x2 $0, $1, $2, $3;" if tl.bfloat16 == DTYPE else "fma.rn.f16x2 $0, $1, $2, $3;"
        )
        both = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
    return both


@triton.jit
def _twice(halves):
    """The low halves of int32s twice, and the high halves twice, as the last dimension."""
    low = (halves & 0xFFFF) | (halves << 16)
    high = ((halves >> 16) & 0xFFFF) | (halves & -0x10000)
    return tl.join(low, high)


@triton.jit
def e2m1(bits, DTYPE: tl.constexpr):
    """The low 4 bits of each half of an int32, sign, two bits of exponent and one of mantissa, put where the
    type has them. The number is too small by 2^126 in bf16, by 2^14 in fp16."""
    SHIFT: tl.constexpr = 6 if tl.bfloat16 == DTYPE else 9
    return ((bits << 12) & -0x7FFF8000) | ((bits << SHIFT) & (0x00070007 << SHIFT))


@triton.jit
def _weights(
    words,
    scales,
    minima,
    TILES: tl.constexpr,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMA: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """From the words of TILES tiles, [TILES, 32, 4], to weights, [16 TILES, 256 / BITS]. `scales` and
    `minima`, of the same shape, hold outputs g and g + 8 in one int32."""
    # A lane, 4 g + c, has outputs g + 8 h. Of each 16 inputs it has numbers 8 u + 2 c + e; e counts
    # the halves of each int32.
    if E2M1:
        low, high = tl.join(words, words >> 8), tl.join(words >> 4, words >> 12)  # u is the last dimension.
        pairs = tl.join(e2m1(low, DTYPE), e2m1(high, DTYPE))
    elif BITS == 4:
        both = tl.join(words, words >> 8)
        pairs = tl.join(both & 0x000F000F, both & 0x00F000F0)
    else:  # u is the last bit of a word's number.
        pairs = tl.join(words & 0x00FF00FF, (words >> 8) & 0x00FF00FF)
    scales = _twice(scales)
    nothing = tl.full(scales.shape, -0x7FFF8000, tl.int32)  # -0.0
    if MINIMA:
        lowest = _twice(minima)
    elif E2M1:
        lowest = nothing
    else:  # less the quant that stands for 0: 8 (the high one lies 4 bits higher) or 128
        zeros = tl.full(words.shape, -0x7FF77FF8 if BITS == 4 else -0x7F7F7F80, tl.int32)
        lowest = fma(scales, tl.join(zeros, tl.full(words.shape, -0x7F7F7F80, tl.int32)), nothing, DTYPE)
    if BITS == 4:
        scales, lowest = scales[:, :, :, None, :], lowest[:, :, :, None, :]
    pairs = fma(pairs, scales, lowest, DTYPE)
    weights = tl.join(number(pairs, DTYPE), number(pairs >> 16, DTYPE))
    weights = tl.reshape(weights, (TILES, 8, 4, 16 // BITS, 2, 2, 2))  # tile, g, c, 16 inputs, u, h, e
    weights = tl.permute(weights, (0, 5, 1, 3, 4, 2, 6))
    return tl.reshape(weights, (TILES * 16, 256 // BITS))


@triton.jit
def _of_groups(ptrs, group, SCALE_GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """The scales (or minima) of a step's inputs, which are in one group, two or four: [TILES, 32, 4]."""
    TILES: tl.constexpr = ptrs.shape[0]
    ptrs += group * 8
    first = tl.load(ptrs)
    if SCALE_GROUP >= COLUMNS:
        found = tl.broadcast_to(first[:, :, None], (TILES, 32, 4))
    else:
        both = tl.join(first, tl.load(ptrs + 8))
        if SCALE_GROUP * 2 == COLUMNS:
            both = tl.broadcast_to(both[:, :, :, None], (TILES, 32, 2, 2))
        else:
            tl.static_assert(SCALE_GROUP * 4 == COLUMNS)
            both = tl.join(both, tl.join(tl.load(ptrs + 16), tl.load(ptrs + 24)))
            both = tl.trans(both, (0, 1, 3, 2))
        found = tl.reshape(both, (TILES, 32, 4))
    return found
