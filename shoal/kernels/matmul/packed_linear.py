"""Matmuls with weights of 4 or 8 bits that lie as gpu_weight.py lays them.

A few rows are bound by the reading of the weights, so they are read packed and become bf16 or fp16 in
registers (loaders.py, tile_matmul.py). One row has a pipeline of its own on Hopper. For many rows a matrix is
unpacked, by `unpack_rows`, into a tensor of the step, and multiplied as any matrix in 16 bits is (linear.py).

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matrix that
`unpack_rows` gives.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul
from shoal.kernels.matmul.dispatch import After, Kernel
from shoal.kernels.matmul.launch import choose_for, launch
from shoal.kernels.matmul.linear import linear, linear_add, linear_gated
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

UNPACKED = 1 << 29  # As many weights are unpacked at a time: 1 GB. An output head may have more.
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


def packed_linear(x_TI: torch.Tensor, weight: TiledWeight, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias. Bits do not depend on timing, as in the next two."""
    outs, inputs = weight.shape
    chosen = choose_for(weight, x_TI, bias_O)
    if chosen.kernel is not Kernel.UNPACKED:
        return launch(chosen, x_TI, weight, bias_O, False)
    step = UNPACKED // inputs // UNPACKED_ROWS * UNPACKED_ROWS
    if outs <= step:
        return linear(x_TI, _unpacked(weight), bias_O)
    out_TO = x_TI.new_empty((len(x_TI), outs))
    for first in range(0, outs, step):
        rows = slice(first, min(outs, first + step))
        part = unpack_rows(weight, rows.start, rows.stop)
        out_TO[:, rows] = linear(x_TI, part, None if bias_O is None else bias_O[rows])
    return out_TO


def packed_add(
    x_TI: torch.Tensor, weight: TiledWeight, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """As linear.linear_add."""
    chosen = choose_for(weight, x_TI, bias_O, after=After.ADD)
    if chosen.kernel is Kernel.UNPACKED:
        return linear_add(x_TI, _unpacked(weight), bias_O, residual_TO)
    launch(chosen, x_TI, weight, bias_O, False, residual_TO)
    return None


def packed_gated(
    x_TI: torch.Tensor, weight: TiledWeight, bias_2F: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """activation(first half of the outputs) * second half."""
    chosen = choose_for(weight, x_TI, bias_2F, after=After.SILU_MUL)
    if chosen.kernel is Kernel.UNPACKED:
        return linear_gated(x_TI, _unpacked(weight), bias_2F, activation)
    # Kernels of few rows end with SiLU alone, and their tiles have 16 outputs of gate, or of up.
    if activation != "silu" or weight.shape[0] % 32:
        return gate_mul(packed_linear(x_TI, weight, bias_2F), activation)
    return launch(chosen, x_TI, weight, bias_2F, True)


def _unpacked(weight: TiledWeight) -> torch.Tensor:
    return unpack_rows(weight, 0, weight.shape[0])


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
