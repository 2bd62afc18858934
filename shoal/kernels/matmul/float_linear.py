"""Matmuls of rows in 16 bits with a weight in float32, such as routers have, in Triton: rows become no tensor
in float32, and the kernels keep to programmatic launches (pdl.py), as cuBLAS does not. A program has its
first weights before it waits.

A few rows are multiplied elementwise, where a norm before is part of the kernel. For more in bf16 a weight is
the sum of three numbers in bf16, which have its 24 bits, so tensor cores give what float32 gives but for the
order of sums.

T rows · I inputs · O outputs. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.matmul.split_k import arrival_counters, arrives_last
from shoal.kernels.norm import normed_row, rms_norm
from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2

FEW_ROWS = 16  # Each reads the weight for itself.
WIDEST = 8192  # inputs, which a program has at once
# Types three of which have a weight's 24 bits, small weights too.
SPLIT_TYPES = (torch.bfloat16,)
PROGRAMS = 128  # that inputs are split for
MAX_SPLITS = 8
MANY_ROWS = 512  # More of them get large tiles.
MAX_TILES = 1024  # tiles of a launch whose inputs are split


@triton.jit
def _float_linear_kernel(
    x_ptr,
    norm_ptr,
    normed_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The grid is (rows, outputs). With `norm_ptr` the row's norm takes the place of the row; the program of
    the first output stores it in `normed_ptr`."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1)
    column = tl.arange(0, BLOCK_I)
    weight = tl.load(weight_ptr + out.to(tl.int64) * I + column, mask=column < I, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column < I, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * I + column, mask=column < I, other=0.0)
    if norm_ptr is not None:
        x = normed_row(x.to(tl.float32), norm, eps, I).to(x.dtype)
        tl.store(normed_ptr + row * I + column, x, mask=(column < I) & (out == 0))
    x = x.to(tl.float32)
    result = tl.sum(x * weight)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + out)
    tl.store(out_ptr + row * O + out, result)


@triton.jit(do_not_specialize=["T"])
def _many_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    T,
    O,
    I,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The grid is (tiles of rows, tiles of outputs, splits of the inputs)."""
    start_next(PDL)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    size = tl.cdiv(tl.cdiv(I, BLOCK_I), SPLITS) * BLOCK_I
    begin, end = split * size, tl.minimum((split + 1) * size, I)
    column = tl.arange(0, BLOCK_I)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * I + column[None, :]
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :] * I + column[:, None]
    in_rows, in_outs = (row < T)[:, None], (out < O)[None, :]
    weight = tl.load(weight_ptrs + begin, mask=in_outs & (begin + column < end)[:, None], other=0.0)
    wait_for_previous(PDL)
    # Tensor cores cut off sums of floats, so each step's is added by itself. With no max_num_imprecise_acc
    # Triton would let the tensor cores add it.
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    small = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(begin, end, BLOCK_I):
        x = tl.load(x_ptrs + start, mask=in_rows & (start + column < end)[None, :], other=0.0)
        high = weight.to(x.dtype)
        rest = weight - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        ahead = start + BLOCK_I
        weight = tl.load(weight_ptrs + ahead, mask=in_outs & (ahead + column < end)[:, None], other=0.0)
        small = tl.dot(x, middle, tl.dot(x, low, small))
        sums += tl.dot(x, high, max_num_imprecise_acc=BLOCK_I)
    sums += small
    stored = in_rows & in_outs
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        place = tl.arange(0, BLOCK_T)[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        part_ptrs = parts_ptr + tile * (SPLITS * BLOCK_T * BLOCK_O) + place
        tl.store(part_ptrs + split * (BLOCK_T * BLOCK_O), sums)
        if not arrives_last(arrived_ptr + tile, SPLITS):
            return
        sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
        for other in tl.static_range(SPLITS):
            sums += tl.load(part_ptrs + other * (BLOCK_T * BLOCK_O), cache_modifier=".cg")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * O + out[None, :], sums, mask=stored)


def float_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """As reference.float_linear."""
    (rows, inputs), outs = x_TI.shape, len(weight_OI)
    few = _are_few(x_TI)
    if rows == 0 or x_TI.dtype == torch.float32 or not (few or x_TI.dtype in SPLIT_TYPES):
        return F.linear(x_TI.float(), weight_OI, bias_O)
    assert x_TI.is_contiguous() and weight_OI.is_contiguous() and weight_OI.dtype == torch.float32
    assert bias_O is None or bias_O.dtype == torch.float32
    if few:
        return _few_rows(x_TI, weight_OI, bias_O)
    out_TO = torch.empty(rows, outs, dtype=torch.float32, device=x_TI.device)
    block_rows, block_outs, block_inputs = (32, 32, 128) if rows <= MANY_ROWS else (128, 64, 64)
    tiles = cdiv(rows, block_rows), cdiv(outs, block_outs)
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (tiles[0] * tiles[1]), cdiv(inputs, block_inputs)))
    parts, arrived = out_TO, out_TO
    if splits > 1:
        assert tiles[0] * tiles[1] <= MAX_TILES
        parts = out_TO.new_empty(tiles[0] * tiles[1] * splits * block_rows * block_outs)
        arrived = arrival_counters("float_linear", MAX_TILES, x_TI.device)
    _many_rows_kernel[(*tiles, splits)](
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        parts,
        arrived,
        rows,
        outs,
        inputs,
        SPLITS=splits,
        BLOCK_T=block_rows,
        BLOCK_O=block_outs,
        BLOCK_I=block_inputs,
        num_warps=4 if rows <= MANY_ROWS else 8,
        **pdl_options(),
    )
    return out_TO


def norm_float_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.norm_float_linear. A few rows take one kernel."""
    if len(x_TD) == 0 or x_TD.dtype == torch.float32 or not _are_few(x_TD):
        normed_TD = rms_norm(x_TD, norm_weight_D, eps)
        return normed_TD, float_linear(normed_TD, weight, bias)
    normed_TD = empty_matmul_input(x_TD, *x_TD.shape)
    return normed_TD, _few_rows(x_TD, weight, bias, norm_weight_D, normed_TD, eps)


def _are_few(x_TI: torch.Tensor) -> bool:
    return x_TI.shape[0] <= FEW_ROWS and x_TI.shape[1] <= WIDEST


def _few_rows(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
    normed_TI: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The matmul of x, or of its norm, which is written into `normed_TI`."""
    assert x_TI.is_contiguous() and weight_OI.is_contiguous() and weight_OI.dtype == torch.float32
    (rows, inputs), outs = x_TI.shape, len(weight_OI)
    out_TO = torch.empty(rows, outs, dtype=torch.float32, device=x_TI.device)
    _float_linear_kernel[(rows, outs)](
        x_TI,
        norm_weight_I,
        normed_TI,
        weight_OI,
        bias_O,
        out_TO,
        eps,
        outs,
        inputs,
        BLOCK_I=next_power_of_2(inputs),
        num_warps=4,
        **pdl_options(),
    )
    return out_TO
