"""token_history.py in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import RowOptions
from shoal.kernels.sampling.row_options_triton import LAST, READS_HISTORY, record_at, token_ptrs

WIDE = tl.constexpr(4096)  # columns that a program takes
MOST_ROWS = 64  # rows of one call


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
    addresses_ptr,
    block_tables_ptr,
    history_ptr,
    tables_stride,
    BLOCK_SIZE: tl.constexpr,
):
    k = tl.program_id(0)
    row = tl.load(rows_ptr + k).to(tl.int64)
    if row < 0:
        return
    record_ptr = record_at(addresses_ptr, row)
    if tl.load(record_ptr + READS_HISTORY) != 0:
        table_ptr = block_tables_ptr + row * tables_stride
        ptr = token_ptrs(history_ptr, table_ptr, tl.load(positions_ptr + k), True, BLOCK_SIZE)
        tl.store(ptr, tl.load(record_ptr + LAST))


def remember_last(rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions) -> None:
    _remember_last_kernel[(rows_K.shape[0],)](
        rows_K,
        positions_K,
        options.addresses_R,
        options.block_tables_RM,
        options.history,
        options.block_tables_RM.stride(0),
        BLOCK_SIZE=options.history.shape[1],
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _set_last_kernel(
    samples_ptr, rows_ptr, tokens_ptr, sampled_ptr, addresses_ptr, num_rows, BLOCK: tl.constexpr
):
    k = tl.arange(0, BLOCK)
    sample = tl.load(samples_ptr + k, mask=k < num_rows, other=-1)
    row = tl.load(rows_ptr + k, mask=k < num_rows, other=-1)
    token = tl.load(tokens_ptr + k, mask=k < num_rows, other=0)
    tl.store(sampled_ptr + sample, token, mask=sample >= 0)
    address = tl.load(addresses_ptr + row, mask=row >= 0, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)) + LAST, token, mask=row >= 0)


def set_last(
    samples_K: torch.Tensor,
    rows_K: torch.Tensor,
    tokens_K: torch.Tensor,
    sampled_S: torch.Tensor,
    options: RowOptions,
) -> None:
    num_rows = rows_K.shape[0]
    assert num_rows <= MOST_ROWS
    _set_last_kernel[(1,)](
        samples_K, rows_K, tokens_K, sampled_S, options.addresses_R, num_rows, BLOCK=MOST_ROWS, num_warps=1
    )
