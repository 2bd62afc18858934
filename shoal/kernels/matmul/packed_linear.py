"""Matmuls with weights of 4 or 8 bits that lie as gpu_weight.py lays them, in Triton.

A few rows are bound by the reading of the weights, so they are read packed, 16 bytes a thread, and become
bf16 or fp16 in registers. Each thread gets just the weights that it has to feed to the tensor cores, because
they lie in the order of their left operand, so nothing moves between threads.

Two numbers of 16 bits share a register, and no conversion is needed: the bits of a quant q of up to 8 bits,
taken as they are, are the number q * 2^-133 in bf16 (2^-24 in fp16), mostly subnormal. So a pair
of weights costs a mask and a multiplication by a scale that makes up for it, with its minimum added in the
same instruction. That scale would be beyond the type's range if weights were not too small by a power of two
(SMALLER), which the sums make good.

If there are few outputs, the inputs are split, so that all SMs read; the last program of a tile to arrive
adds the parts in a fixed order. Of many rows cuBLAS makes the matmul, of weights that `unpack_rows` has
unpacked, some outputs at a time.

GATED: the weight is gate over up, and silu(gate) * up leaves the kernel instead of the two. ADD: the matmul,
rounded as one of its own, is added to what the output holds, the residual.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matrix that
`unpack_rows` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul
from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import MAX_PACKED_TILES, After, Before, Kernel, PackedTiles, Shape, choose
from shoal.kernels.matmul.linear import epilogue, fitting_stages
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.pdl import ORDINARY, pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv

if HAS_GLUON:
    from shoal.kernels.matmul import hopper_int4_row

UNPACKED = 1 << 26  # As many weights are unpacked at a time for cuBLAS: 128 MB.
# Weights in registers are too small by 2^this. It leaves room for scales up to 2^10 (1/2 in fp16) there.
SMALLER = {torch.bfloat16: 16, torch.float16: 7}
# The interpreter knows no assembler.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LARGER_BF16, LARGER_FP16 = (tl.constexpr(2.0**exponent) for exponent in SMALLER.values())


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
def _number(bits, DTYPE: tl.constexpr):
    """The low 16 bits of an int32 as a number."""
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _fma(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of two numbers in each int32, rounded once."""
    if INTERPRETED:
        low = _number(a, DTYPE).to(tl.float32) * _number(b, DTYPE) + _number(c, DTYPE)
        high = _number(a >> 16, DTYPE).to(tl.float32) * _number(b >> 16, DTYPE) + _number(c >> 16, DTYPE)
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
def _e2m1(bits, DTYPE: tl.constexpr):
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
        pairs = tl.join(_e2m1(low, DTYPE), _e2m1(high, DTYPE))
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
        lowest = _fma(scales, tl.join(zeros, tl.full(words.shape, -0x7F7F7F80, tl.int32)), nothing, DTYPE)
    if BITS == 4:
        scales, lowest = scales[:, :, :, None, :], lowest[:, :, :, None, :]
    pairs = _fma(pairs, scales, lowest, DTYPE)
    weights = tl.join(_number(pairs, DTYPE), _number(pairs >> 16, DTYPE))
    weights = tl.reshape(weights, (TILES, 8, 4, 16 // BITS, 2, 2, 2))  # tile, g, c, 16 inputs, u, h, e
    weights = tl.permute(weights, (0, 5, 1, 3, 4, 2, 6))
    return tl.reshape(weights, (TILES * 16, 256 // BITS))


@triton.jit
def _of_groups(ptrs, group, SCALE_GROUPS: tl.constexpr):
    """The scales (or minima) of a step's inputs, which are in one group or in two: [TILES, 32, 4]."""
    first = tl.load(ptrs + group * 8)
    if SCALE_GROUPS == 1:
        found = tl.broadcast_to(first[:, :, None], (first.shape[0], 32, 4))
    else:
        both = tl.join(first, tl.load(ptrs + group * 8 + 8))
        both = tl.broadcast_to(both[:, :, :, None], (first.shape[0], 32, 2, 2))
        found = tl.reshape(both, (first.shape[0], 32, 4))
    return found


@triton.jit
def add_step(
    x,
    words_ptrs,
    scales_ptrs,
    minima_ptrs,
    step,
    group,
    sums,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    MINIMA: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
):
    """Adds the matmul of one step's inputs to the sums, [outputs, rows]."""
    COLUMNS: tl.constexpr = 256 // BITS
    SCALE_GROUPS: tl.constexpr = 1 if SCALE_GROUP >= COLUMNS else COLUMNS // SCALE_GROUP
    scales = _of_groups(scales_ptrs, group, SCALE_GROUPS)
    minima = _of_groups(minima_ptrs, group, SCALE_GROUPS) if MINIMA else scales
    words = tl.load(words_ptrs + step * 128)
    weights = _weights(words, scales, minima, words.shape[0], BITS, E2M1, MINIMA, x.dtype)
    return tl.dot(weights, tl.trans(x), sums)


@triton.jit(do_not_specialize=["T", "steps"])
def packed_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    O,
    I,
    T,
    steps,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matmul of the rows of program 0 and the outputs of program 1, over the inputs of `steps` * STEPS
    steps of program 2. A step is 16 bytes of a thread: 256 / BITS inputs. EVEN: the inputs are whole rounds
    of STEPS steps."""
    MINIMA: tl.constexpr = minima_ptr is not None
    COLUMNS: tl.constexpr = 256 // BITS
    TILES: tl.constexpr = BLOCK_O // 16
    all_steps = tl.cdiv(I, COLUMNS)
    groups = tl.cdiv(I, SCALE_GROUP) if SCALE_GROUP >= COLUMNS else all_steps * (COLUMNS // SCALE_GROUP)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES)).to(tl.int64)
    lane = tl.arange(0, 32)
    words_ptrs = (
        words_ptr
        + (tile * all_steps * 128)[:, None, None]
        + lane[None, :, None] * 4
        + tl.arange(0, 4)[None, None, :]
    )
    at_scales = (tile * groups * 8)[:, None] + lane[None, :] // 4
    scales_ptrs = scales_ptr + at_scales
    minima_ptrs = scales_ptrs
    if MINIMA:
        minima_ptrs = minima_ptr + at_scales
    to_up = (O // 16).to(tl.int64)  # tiles from gate to up, of a gated matmul
    column = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * I + column[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[None, :] * O + out[:, None]
    inside = (row < T)[None, :] & (out < O)[:, None]
    wait_for_inputs(PDL)

    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    first = tl.program_id(2) * steps * STEPS
    for start in range(first, tl.minimum(first + steps * STEPS, all_steps), STEPS):
        for i in tl.static_range(STEPS):
            step = start + i
            in_x = (row < T)[:, None]
            if not EVEN:
                in_x = in_x & (step * COLUMNS + column < I)[None, :]
                step = tl.minimum(step, all_steps - 1)  # Whatever is read there meets zeros.
            x = tl.load(x_ptrs + (start + i) * COLUMNS, mask=in_x, other=0.0)
            # One expression where all steps of a round are in one group, so that it is loaded once.
            group = (
                start * COLUMNS // SCALE_GROUP
                if SCALE_GROUP >= STEPS * COLUMNS
                else step * COLUMNS // SCALE_GROUP
            )
            sums = add_step(
                x, words_ptrs, scales_ptrs, minima_ptrs, step, group, sums, BITS, E2M1, MINIMA, SCALE_GROUP
            )
            if GATED:
                up_sums = add_step(
                    x,
                    words_ptrs + to_up * all_steps * 128,
                    scales_ptrs + to_up * groups * 8,
                    minima_ptrs + to_up * groups * 8,
                    step,
                    group,
                    up_sums,
                    BITS,
                    E2M1,
                    MINIMA,
                    SCALE_GROUP,
                )

    if SPLITS > 1:
        PART: tl.constexpr = BLOCK_O * BLOCK_T
        at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts_ptr += at.to(tl.int64) * (SPLITS * PART * (1 + GATED))
        part_ptrs = parts_ptr + (tl.arange(0, BLOCK_O) * BLOCK_T)[:, None] + tl.arange(0, BLOCK_T)[None, :]
        own = part_ptrs + tl.program_id(2) * (PART * (1 + GATED))
        tl.store(own, sums, mask=inside)
        if GATED:
            tl.store(own + PART, up_sums, mask=inside)
        # All threads have stored before one of them says so (release), and that one has heard of the others
        # before any reads (acquire).
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + at, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(arrived_ptr + at, 0)
        tl.debug_barrier()
        sums = tl.load(part_ptrs, mask=inside, other=0.0, cache_modifier=".cg")
        if GATED:
            up_sums = tl.load(part_ptrs + PART, mask=inside, other=0.0, cache_modifier=".cg")
        for split in range(1, SPLITS):
            other = part_ptrs + split * (PART * (1 + GATED))
            sums += tl.load(other, mask=inside, other=0.0, cache_modifier=".cg")
            if GATED:
                up_sums += tl.load(other + PART, mask=inside, other=0.0, cache_modifier=".cg")
    LARGER: tl.constexpr = LARGER_BF16 if x_ptr.dtype.element_ty == tl.bfloat16 else LARGER_FP16
    sums, up_sums = sums * LARGER, up_sums * LARGER
    result = epilogue(sums, up_sums, bias_ptr, out[:, None], O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        before = tl.load(out_ptrs, mask=inside, other=0.0)
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=inside)


@triton.jit
def _half_of(ptr, at, high, mask):
    """The low or high half of an int32."""
    return (tl.load(ptr + at, mask=mask, other=0) >> (16 * high).to(tl.int32)) & 0xFFFF


@triton.jit
def _unpack_kernel(
    ids_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    out_ptr,
    first,
    I,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Unpacks some inputs of one output, given by an id, or by the program's number and `first`."""
    COLUMNS: tl.constexpr = 256 // BITS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if ids_ptr is None:
        out = tl.program_id(0) + first
    else:
        out = tl.load(ids_ptr + tl.program_id(0))
    out = out.to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    all_steps = tl.cdiv(I, COLUMNS)
    groups = tl.cdiv(I, SCALE_GROUP) if SCALE_GROUP >= COLUMNS else all_steps * (COLUMNS // SCALE_GROUP)
    tile, h, g = out // 16, out // 8 % 2, out % 8
    u, c, e = column // 8 % 2, column // 2 % 4, column % 2
    if BITS == 4:
        word, shift, mask = column // 16 % 4, 8 * u + 16 * e, 15 << (4 * h).to(tl.int32)
    else:
        word, shift, mask = column // 8 % 4, 8 * h + 16 * e, 255
    at = (tile * all_steps + column // COLUMNS) * 128 + (4 * g + c) * 4 + word
    bits = (tl.load(words_ptr + at, mask=inside, other=0) >> shift.to(tl.int32)) & mask
    if E2M1:
        bits = _e2m1(bits >> (4 * h).to(tl.int32), DTYPE)
    at = (tile * groups + column // SCALE_GROUP) * 8 + g
    scales = _half_of(scales_ptr, at, h, inside)
    lowest = tl.full((BLOCK,), 0x8000, tl.int32)
    if minima_ptr is not None:
        lowest = _half_of(minima_ptr, at, h, inside)
    elif not E2M1:
        zeros = lowest | ((8 << (4 * h)).to(tl.int32) if BITS == 4 else 128)
        lowest = _fma(scales, zeros, lowest, DTYPE)
    weights = _number(_fma(bits, scales, lowest, DTYPE), DTYPE)
    LARGER: tl.constexpr = LARGER_BF16 if tl.bfloat16 == DTYPE else LARGER_FP16
    weights = (weights.to(tl.float32) * LARGER).to(DTYPE)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * I + column, weights, mask=inside)


def packed_matmul(
    x_TI: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_TO` in place, if there is one, which is then returned. Bits do not depend on timing."""
    outs, inputs = weight.shape[0] // (1 + gated), weight.shape[1]
    after = After.SILU_MUL if gated else After.NOTHING if residual_TO is None else After.ADD
    shape = Shape(outs, inputs, after=after, bias=bias is not None, bits=weight.bits, group=weight.group)
    chosen = choose(shape, x_TI.shape[0], x_TI.dtype, dispatch.gpu_of(x_TI.device))
    if chosen.kernel is Kernel.HOPPER_INT4_ROW:
        return _ring(x_TI, weight, bias, gated, residual_TO)
    if chosen.packed_tiles is not None:
        return matmul(chosen.packed_tiles, x_TI, weight, bias, gated, residual_TO)
    if gated:
        return gate_mul(packed_matmul(x_TI, weight, bias, False))
    out_TO = x_TI.new_empty((x_TI.shape[0], outs)) if residual_TO is None else residual_TO
    step = max(1, UNPACKED // inputs)
    for first in range(0, outs if len(x_TI) else 0, step):
        rows = slice(first, min(outs, first + step))
        unpacked = unpack_rows(weight, rows.start, rows.stop)
        y = F.linear(x_TI, unpacked, None if bias is None else bias[rows])
        if residual_TO is None:
            out_TO[:, rows] = y
        else:
            out_TO[:, rows] += y
    return out_TO


def matmul_of_norm(
    residual_TI: torch.Tensor,
    norm_weight_I: torch.Tensor,
    eps: float,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """The matmul of the residual's norm, gated if there is an activation, where one kernel makes both. None:
    none does."""
    if activation not in (None, "silu"):
        return None
    gated = activation is not None
    outs, inputs = weight.shape[0] // (1 + gated), weight.shape[1]
    after = After.SILU_MUL if gated else After.NOTHING
    shape = Shape(outs, inputs, Before.NORM, after, bias is not None, weight.bits, weight.group)
    chosen = choose(shape, len(residual_TI), residual_TI.dtype, dispatch.gpu_of(residual_TI.device))
    if not chosen.norms or weight.e2m1:
        return None
    return _ring(residual_TI, weight, bias, gated, None, norm_weight_I, eps)


def _ring(
    x_1I: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_1O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    assert x_1I.is_contiguous() and not weight.e2m1
    out_1O = residual_1O
    if out_1O is None:
        out_1O = empty_matmul_input(x_1I, 1, weight.shape[0] // (1 + gated))
    hopper_int4_row.hopper_int4_row_matmul(
        x_1I,
        weight.words,
        weight.scales,
        weight.minima,
        bias,
        out_1O,
        gated=gated,
        add=residual_1O is not None,
        norm_weight_I=norm_weight_I,
        eps=eps,
    )
    return out_1O


def matmul(
    tiles: PackedTiles,
    x_TI: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same, cut as `tiles` say."""
    assert x_TI.is_contiguous() and x_TI.dtype == weight.dtype
    (rows, inputs), outs = x_TI.shape, weight.shape[0] // (1 + gated)
    assert inputs == weight.shape[1] and not (gated and (outs % 16 or tiles.outs > 64))
    out_TO = empty_matmul_input(x_TI, rows, outs) if residual_TO is None else residual_TO
    assert out_TO.is_contiguous() and out_TO.shape == (rows, outs) and out_TO.dtype == x_TI.dtype
    grid = (cdiv(rows, tiles.rows), cdiv(outs, tiles.outs), tiles.splits)
    parts, arrived = out_TO, out_TO
    if tiles.splits > 1:
        assert grid[0] * grid[1] <= MAX_PACKED_TILES
        size = grid[0] * grid[1] * tiles.splits * tiles.rows * tiles.outs * (1 + gated)
        parts, arrived = (
            x_TI.new_empty(size, dtype=torch.float32),
            arrival_counters("packed_linear", MAX_PACKED_TILES, x_TI.device),
        )
    columns = 256 // weight.bits * tiles.steps
    stage_bytes = (tiles.rows * 2 + tiles.outs * (1 + gated)) * columns
    packed_kernel[grid](
        x_TI,
        weight.words,
        weight.scales,
        weight.minima,
        bias,
        out_TO,
        parts,
        arrived,
        outs,
        inputs,
        rows,
        tiles.rounds(inputs, weight.bits),
        BITS=weight.bits,
        E2M1=weight.e2m1,
        SCALE_GROUP=weight.group,
        GATED=gated,
        ADD=residual_TO is not None,
        EVEN=inputs % columns == 0,
        SPLITS=tiles.splits,
        BLOCK_T=tiles.rows,
        BLOCK_O=tiles.outs,
        STEPS=tiles.steps,
        num_warps=tiles.outs // 16,
        num_stages=fitting_stages(tiles.num_stages, stage_bytes, x_TI.device),
        **pdl_options(),
    )
    return out_TO


def unpack_rows(weight: TiledWeight, start: int, stop: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [start, stop) of the matrix, or rows `ids`, in its own dtype and order of inputs."""
    rows, inputs = stop - start if ids is None else len(ids), weight.shape[1]
    out = torch.empty((rows, inputs), dtype=weight.dtype, device=weight.words.device)
    block = 1024
    if rows:
        _unpack_kernel[(rows, cdiv(inputs, block))](
            ids,
            weight.words,
            weight.scales,
            weight.minima,
            out,
            start,
            inputs,
            BITS=weight.bits,
            E2M1=weight.e2m1,
            SCALE_GROUP=weight.group,
            BLOCK=block,
            num_warps=4,
            **ORDINARY,
        )
    return out
