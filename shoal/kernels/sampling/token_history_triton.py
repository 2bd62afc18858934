"""token_history.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import RowOptions
from shoal.kernels.sampling.row_options_triton import (
    LAST,
    NUM_OPTIONS,
    READS_HISTORY,
    load_option,
    token_ptrs,
)

WIDE = tl.constexpr(4096)  # columns that a program takes


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
def _remember_last_kernel(
    rows_ptr,
    positions_ptr,
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
        tl.store(ptr, load_option(fields_ptr, row, LAST))


def remember_last(rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions) -> None:
    _remember_last_kernel[(rows_K.shape[0],)](
        rows_K,
        positions_K,
        options.fields_RO,
        options.block_tables_RM,
        options.history,
        options.block_tables_RM.stride(0),
        BLOCK_SIZE=options.history.shape[1],
        num_warps=1,
    )


@triton.jit
def _set_last_kernel(samples_ptr, rows_ptr, tokens_ptr, sampled_ptr, fields_ptr):
    k = tl.program_id(0)
    sample, row = tl.load(samples_ptr + k), tl.load(rows_ptr + k)
    token = tl.load(tokens_ptr + k)
    tl.store(sampled_ptr + sample, token, mask=sample >= 0)
    tl.store(fields_ptr + row * NUM_OPTIONS + LAST, token, mask=row >= 0)


def set_last(
    samples_K: torch.Tensor,
    rows_K: torch.Tensor,
    tokens_K: torch.Tensor,
    sampled_S: torch.Tensor,
    options: RowOptions,
) -> None:
    _set_last_kernel[(rows_K.shape[0],)](
        samples_K, rows_K, tokens_K, sampled_S, options.fields_RO, num_warps=1
    )
