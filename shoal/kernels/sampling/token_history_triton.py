"""token_history.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import RowOptions, WholeRow
from shoal.kernels.sampling.row_options_triton import READS_HISTORY, load_option, token_ptrs

WIDE = tl.constexpr(4096)  # columns that a program takes


# Its pointers begin anywhere in a step's sections.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "samples_ptr",
        "shaped_ptr",
        "rows_ptr",
        "positions_ptr",
        "tokens_ptr",
        "out_ptr",
    ],
)
def _locate_rows_kernel(
    samples_ptr,
    shaped_ptr,
    rows_ptr,
    positions_ptr,
    tokens_ptr,
    out_ptr,
    num_rows,
    SAMPLE: tl.constexpr,
    ROW: tl.constexpr,
    POSITION: tl.constexpr,
    TOKEN: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    k = tl.program_id(0)
    sample = tl.load(samples_ptr + k)
    is_there = sample >= 0
    row = tl.load(rows_ptr + sample, mask=is_there, other=-1)
    tl.store(out_ptr + SAMPLE * num_rows + k, tl.where(row >= 0, sample, -1))
    tl.store(out_ptr + ROW * num_rows + k, row)
    tl.store(out_ptr + POSITION * num_rows + k, tl.load(positions_ptr + sample, mask=is_there, other=-1))
    tl.store(out_ptr + TOKEN * num_rows + k, tl.load(tokens_ptr + sample, mask=is_there, other=0))
    tl.store(out_ptr + OPTIONS * num_rows + k, tl.where(tl.load(shaped_ptr + k) > 0, row, -1))


def locate_rows(
    samples_K: torch.Tensor,
    shaped_K: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    tokens_S: torch.Tensor,
    out_XK: torch.Tensor,
) -> None:
    assert out_XK.is_contiguous()
    num_rows = samples_K.shape[0]
    inputs = samples_K, shaped_K, rows_S, positions_S, tokens_S
    columns = {column.name: column.value for column in WholeRow}
    _locate_rows_kernel[(num_rows,)](*inputs, out_XK, num_rows, **columns, num_warps=1)


@triton.jit
def _take_rows_kernel(logits_ptr, samples_ptr, out_ptr, logits_stride, out_stride, V: tl.constexpr):
    k = tl.program_id(1).to(tl.int64)
    sample = tl.load(samples_ptr + k).to(tl.int64)
    if sample < 0:
        return
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.load(logits_ptr + sample * logits_stride + column, mask=column < V)
    tl.store(out_ptr + k * out_stride + column, row.to(out_ptr.dtype.element_ty), mask=column < V)


def take_rows(logits_SV: torch.Tensor, samples_K: torch.Tensor, out_KV: torch.Tensor) -> None:
    assert logits_SV.stride(1) == out_KV.stride(1) == 1 and logits_SV.shape[1] == out_KV.shape[1]
    num_rows, vocab_size = out_KV.shape
    _take_rows_kernel[(cdiv(vocab_size, WIDE.value), num_rows)](
        logits_SV, samples_K, out_KV, logits_SV.stride(0), out_KV.stride(0), V=vocab_size, num_warps=8
    )


@triton.jit
def _store_tokens_kernel(
    rows_ptr,
    positions_ptr,
    tokens_ptr,
    fields_ptr,
    block_tables_ptr,
    history_ptr,
    tables_stride,
    BLOCK_SIZE: tl.constexpr,
):
    k = tl.program_id(0)
    row = tl.load(rows_ptr + k).to(tl.int64)
    if row < 0:
        return
    if load_option(fields_ptr, row, READS_HISTORY) != 0:
        table_ptr = block_tables_ptr + row * tables_stride
        ptr = token_ptrs(history_ptr, table_ptr, tl.load(positions_ptr + k), True, BLOCK_SIZE)
        tl.store(ptr, tl.load(tokens_ptr + k))


def store_tokens(
    rows_K: torch.Tensor, positions_K: torch.Tensor, tokens_K: torch.Tensor, options: RowOptions
) -> None:
    _store_tokens_kernel[(rows_K.shape[0],)](
        rows_K,
        positions_K,
        tokens_K,
        options.fields_RO,
        options.block_tables_RM,
        options.history,
        options.block_tables_RM.stride(0),
        BLOCK_SIZE=options.history.shape[1],
        num_warps=1,
    )


@triton.jit
def _put_samples_kernel(samples_ptr, tokens_ptr, sampled_ptr):
    k = tl.program_id(0)
    sample = tl.load(samples_ptr + k)
    tl.store(sampled_ptr + sample, tl.load(tokens_ptr + k), mask=sample >= 0)


def put_samples(samples_K: torch.Tensor, tokens_K: torch.Tensor, sampled_S: torch.Tensor) -> None:
    _put_samples_kernel[(samples_K.shape[0],)](samples_K, tokens_K, sampled_S, num_warps=1)
