"""Products of few rows with a weight matrix, in Triton: their time is that of reading the weights. Many rows, and float32, go to cuBLAS.

A few rows are multiplied elementwise in float32 with tiles of the weight, the first of which is loaded before the rows are there
(pdl.py); more go to tensor cores, the weight as the left operand, so that rows are padded to 16 only. Nothing is split over programs:
a result is one sum in a fixed order. GATED: weight is gate over up, and silu(gate) * up leaves the kernel instead of the two.
T rows · I inputs · O outputs (F of a gated product, whose weight has 2F rows). Oracle: reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.activation import silu, silu_mul
from shoal.kernels.pdl import pdl_options, wait_for_inputs


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: a program computes `outs` outputs of all rows, `columns` inputs at a time."""

    outs: int
    columns: int
    num_warps: int
    num_stages: int = 0    # of the pipeline into the tensor cores; 0: elementwise


def choose_tiles(rows: int, weight_rows: int, columns: int, gated: bool) -> Tiles | None:
    """None: cuBLAS is as fast. All from a sweep on an H200 in bf16 (benchmarks/kernels.py linear); us beside cuBLAS's:"""
    if rows == 1:    # 4096 x 1024: 3.4, 4.8; 1024 x 3072: 2.5, 6.6; 1024 x 2048: 2.1, 12.6; 4096 x 4096: 9.1, 12.4; 151936 x 1024: 70, 74
        if columns <= 1024:
            return Tiles(8, 512, 4)
        return Tiles(2, 2048, 8 if weight_rows <= 1024 else 4)
    if rows <= 4 and not gated and rows * weight_rows * columns <= 1 << 25:    # 4 rows, 1024 x 3072: 3.8, 6.7; larger: arithmetic bound
        return Tiles(4, 256, 1) if columns <= 1024 else Tiles(4, 1024, 4)
    if (rows <= 16 and columns < 4096) or (rows <= 32 and weight_rows >= 24576):    # 16 rows: 3072 x 1024 gated: 5.6, 6.8; head: 75, 80
        return Tiles(64, 128, 4, 5)
    return None


@triton.jit(do_not_specialize=["T"])
def _vector_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, O, I, T, GATED: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
                   BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    """Of T <= BLOCK_T rows, elementwise. EVEN: whole tiles of inputs."""
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_I)[None, None, :]
    in_out, in_row = (out < O)[None, :, None], (row < T)[:, None, None]
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :, None] * I + column
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[None, :, None] * I + column
    x_ptrs = x_ptr + row[:, None, None] * I + column
    in_tile = in_out if EVEN else in_out & (column < I)
    weight = tl.load(weight_ptrs, mask=in_tile, other=0.0)
    if GATED:
        up_weight = tl.load(up_ptrs, mask=in_tile, other=0.0)
    wait_for_inputs(PDL)

    sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    for start in range(0, I, BLOCK_I):
        x = tl.load(x_ptrs + start, mask=in_row if EVEN else in_row & (start + column < I), other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x
        if GATED:
            up_sums += up_weight.to(tl.float32) * x
        next_start = start + BLOCK_I
        in_tile = in_out & (next_start < I) if EVEN else in_out & (next_start + column < I)
        weight = tl.load(weight_ptrs + next_start, mask=in_tile, other=0.0)
        if GATED:
            up_weight = tl.load(up_ptrs + next_start, mask=in_tile, other=0.0)
    result = _finish(tl.sum(sums, axis=2), tl.sum(up_sums, axis=2), bias_ptr, out[None, :], O, out_ptr.dtype.element_ty, GATED)
    tl.store(out_ptr + row[:, None] * O + out[None, :], result, mask=(row < T)[:, None] & (out < O)[None, :])


@triton.jit
def _finish(sums, up_sums, bias_ptr, out, O, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Bias and activation; gate and up are rounded, as a product of its own would."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias_ptr + O + out, mask=out < O, other=0.0).to(tl.float32)
    result = sums.to(DTYPE)
    if GATED:
        result = (silu(result.to(tl.float32)) * up_sums.to(DTYPE).to(tl.float32)).to(DTYPE)
    return result


@triton.jit(do_not_specialize=["T"])
def _matrix_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, O, I, T, GATED: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
                   BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    """Of T <= BLOCK_T rows, by tensor cores: out^T = weight @ x^T."""
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_I)
    in_out, in_row = (out < O)[:, None], (row < T)[None, :]
    weight_ptrs = weight_ptr + out.to(tl.int64)[:, None] * I + column[None, :]
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[:, None] * I + column[None, :]
    x_ptrs = x_ptr + row[None, :] * I + column[:, None]
    wait_for_inputs(PDL)

    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in range(0, I, BLOCK_I):
        if EVEN:
            x = tl.load(x_ptrs + start, mask=in_row, other=0.0)
            in_tile = in_out
        else:
            x = tl.load(x_ptrs + start, mask=in_row & (start + column < I)[:, None], other=0.0)
            in_tile = in_out & (start + column < I)[None, :]
        sums = tl.dot(tl.load(weight_ptrs + start, mask=in_tile, other=0.0), x, sums)
        if GATED:
            up_sums = tl.dot(tl.load(up_ptrs + start, mask=in_tile, other=0.0), x, up_sums)
    result = _finish(sums, up_sums, bias_ptr, out[:, None], O, out_ptr.dtype.element_ty, GATED)
    tl.store(out_ptr + row[None, :] * O + out[:, None], result, mask=in_out & in_row)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    tiles = _tiles(x_TI, weight_OI, gated=False)
    return F.linear(x_TI, weight_OI, bias_O) if tiles is None else product(tiles, x_TI, weight_OI, bias_O, gated=False)


def linear_silu_mul(x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None) -> torch.Tensor:
    """silu(first half of the outputs) * second half."""
    tiles = _tiles(x_TI, weight_2FI, gated=True)
    return silu_mul(F.linear(x_TI, weight_2FI, bias_2F)) if tiles is None else product(tiles, x_TI, weight_2FI, bias_2F, gated=True)


def _tiles(x_TI: torch.Tensor, weight: torch.Tensor, gated: bool) -> Tiles | None:
    if x_TI.shape[0] == 0 or x_TI.dtype == torch.float32:
        return None
    return choose_tiles(x_TI.shape[0], weight.shape[0], weight.shape[1], gated)


def product(tiles: Tiles, x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    assert x_TI.is_contiguous() and weight.is_contiguous()
    (rows, columns), outs = x_TI.shape, weight.shape[0] // (1 + gated)
    out_TO = x_TI.new_empty((rows, outs))
    kernel, min_rows = (_vector_kernel, 1) if tiles.num_stages == 0 else (_matrix_kernel, 16)
    kernel[(triton.cdiv(outs, tiles.outs),)](
        x_TI, weight, bias, out_TO, outs, columns, rows, GATED=gated, EVEN=columns % tiles.columns == 0,
        BLOCK_T=max(min_rows, triton.next_power_of_2(rows)), BLOCK_O=tiles.outs, BLOCK_I=tiles.columns, num_warps=tiles.num_warps,
        num_stages=max(1, tiles.num_stages), **pdl_options())
    return out_TO
