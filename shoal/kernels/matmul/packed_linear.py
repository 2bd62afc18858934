"""Matmuls with weights of 4 or 8 bits that lie as gpu_weight.py lays them.

A few rows are bound by the reading of the weights, so they are read packed and become bf16 or fp16 in
registers (loaders.py, tile_matmul.py). One row has a pipeline of its own on Hopper. Of many rows cuBLAS makes
the matmul, of weights that `unpack_rows` has unpacked, some outputs at a time.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matrix that
`unpack_rows` gives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul
from shoal.kernels.matmul.dispatch import After, Kernel
from shoal.kernels.matmul.launch import choose_for, launch
from shoal.kernels.matmul.loaders import (
    LARGER_BF16,
    LARGER_FP16,
    TILED,
    TiledWeight,
    e2m1,
    first_ptrs,
    fma,
    num_groups,
    number,
    weights_of_step,
)
from shoal.kernels.pdl import ORDINARY
from shoal.kernels.rounding import cdiv

UNPACKED = 1 << 26  # As many weights are unpacked at a time for cuBLAS: 128 MB.
UNPACKED_ROWS = 128  # and as many of their rows by a program


@triton.jit
def _unpack_kernel(
    words_ptr,
    scales_ptr,
    minima_ptr,
    out_ptr,
    first,
    rows,
    O,
    I,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Unpacks a step of inputs of BLOCK_O outputs. `first`: the first program's first output, a multiple of
    BLOCK_O."""
    COLUMNS: tl.constexpr = 256 // BITS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    step, block = tl.program_id(0), tl.program_id(1)
    ptrs, scales_ptrs, minima_ptrs, _, _ = first_ptrs(
        words_ptr,
        scales_ptr,
        minima_ptr,
        tl.zeros((), tl.int64),
        block + first // BLOCK_O,
        O,
        I,
        TILED,
        BITS,
        SCALE_GROUP,
        False,
        BLOCK_O,
        COLUMNS,
    )
    at = step * COLUMNS
    column = at + tl.arange(0, COLUMNS)
    weights = weights_of_step(
        ptrs,
        scales_ptrs,
        minima_ptrs,
        at,
        at // SCALE_GROUP,
        column < I,
        I,
        TILED,
        BITS,
        E2M1,
        minima_ptr is not None,
        SCALE_GROUP,
        True,
        DTYPE,
    )
    LARGER: tl.constexpr = LARGER_BF16 if tl.bfloat16 == DTYPE else LARGER_FP16
    weights = (weights.to(tl.float32) * LARGER).to(DTYPE)
    row = block * BLOCK_O + tl.arange(0, BLOCK_O)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * I + column[None, :]
    tl.store(out_ptrs, weights, mask=(row < rows)[:, None] & (column < I)[None, :])


@triton.jit
def _half_of(ptr, at, high, mask):
    """The low or high half of an int32."""
    return (tl.load(ptr + at, mask=mask, other=0) >> (16 * high).to(tl.int32)) & 0xFFFF


@triton.jit
def _unpack_ids_kernel(
    ids_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    out_ptr,
    I,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Unpacks some inputs of one output."""
    COLUMNS: tl.constexpr = 256 // BITS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    out = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    all_steps = tl.cdiv(I, COLUMNS)
    groups = num_groups(I, all_steps, SCALE_GROUP, COLUMNS)
    tile, h, g = out // 16, out // 8 % 2, out % 8
    u, c, e = column // 8 % 2, column // 2 % 4, column % 2
    if BITS == 4:
        word, shift, mask = column // 16 % 4, 8 * u + 16 * e, 15 << (4 * h).to(tl.int32)
    else:
        word, shift, mask = column // 8 % 4, 8 * h + 16 * e, 255
    at = (tile * all_steps + column // COLUMNS) * 128 + (4 * g + c) * 4 + word
    bits = (tl.load(words_ptr + at, mask=inside, other=0) >> shift.to(tl.int32)) & mask
    if E2M1:
        bits = e2m1(bits >> (4 * h).to(tl.int32), DTYPE)
    at = (tile * groups + column // SCALE_GROUP) * 8 + g
    scales = _half_of(scales_ptr, at, h, inside)
    lowest = tl.full((BLOCK,), 0x8000, tl.int32)
    if minima_ptr is not None:
        lowest = _half_of(minima_ptr, at, h, inside)
    elif not E2M1:
        zeros = lowest | ((8 << (4 * h)).to(tl.int32) if BITS == 4 else 128)
        lowest = fma(scales, zeros, lowest, DTYPE)
    weights = number(fma(bits, scales, lowest, DTYPE), DTYPE)
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
    chosen = choose_for(weight, x_TI, bias, after=after)
    if chosen.kernel is not Kernel.CUBLAS:
        return launch(chosen, x_TI, weight, bias, gated, residual_TO)
    if gated:
        return gate_mul(packed_matmul(x_TI, weight, bias, False))
    out_TO = x_TI.new_empty((x_TI.shape[0], outs)) if residual_TO is None else residual_TO
    step = max(1, UNPACKED // inputs // UNPACKED_ROWS) * UNPACKED_ROWS
    for first in range(0, outs if len(x_TI) else 0, step):
        rows = slice(first, min(outs, first + step))
        unpacked = unpack_rows(weight, rows.start, rows.stop)
        y = F.linear(x_TI, unpacked, None if bias is None else bias[rows])
        if residual_TO is None:
            out_TO[:, rows] = y
        else:
            out_TO[:, rows] += y
    return out_TO


def unpack_rows(weight: TiledWeight, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of the matrix, in its own dtype and order of inputs. `start`: a multiple of
    UNPACKED_ROWS."""
    rows, inputs = stop - start, weight.shape[1]
    assert start % UNPACKED_ROWS == 0
    out = torch.empty((rows, inputs), dtype=weight.dtype, device=weight.words.device)
    if rows:
        _unpack_kernel[(cdiv(inputs, 256 // weight.bits), cdiv(rows, UNPACKED_ROWS))](
            weight.words,
            weight.scales,
            weight.minima,
            out,
            start,
            rows,
            weight.shape[0],
            inputs,
            BITS=weight.bits,
            E2M1=weight.e2m1,
            SCALE_GROUP=weight.group,
            BLOCK_O=UNPACKED_ROWS,
            num_warps=4,
            **ORDINARY,
        )
    return out


def unpack_ids(weight: TiledWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of the matrix, in its own dtype and order of inputs."""
    inputs, block = weight.shape[1], 1024
    out = torch.empty((len(ids), inputs), dtype=weight.dtype, device=weight.words.device)
    if len(ids):
        _unpack_ids_kernel[(len(ids), cdiv(inputs, block))](
            ids,
            weight.words,
            weight.scales,
            weight.minima,
            out,
            inputs,
            BITS=weight.bits,
            E2M1=weight.e2m1,
            SCALE_GROUP=weight.group,
            BLOCK=block,
            num_warps=4,
            **ORDINARY,
        )
    return out
