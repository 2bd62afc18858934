"""penalties.py in Triton.

A program has a tile of a row's vocabulary, and counts the tokens of the sequence that lie in it: a pass over
some thousand tokens takes less than reading counts of the whole vocabulary would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv
from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import (
    NUM_PROMPT,
    count_ids,
    load_float,
    load_option,
    token_ptrs,
)

REPETITION, PRESENCE = tl.constexpr(Option.REPETITION.value), tl.constexpr(Option.PRESENCE.value)
FREQUENCY = tl.constexpr(Option.FREQUENCY.value)
TILE = tl.constexpr(2048)  # tokens of the vocabulary that a program has
CHUNK = tl.constexpr(2048)  # tokens of the sequence that it counts at once


@triton.jit
def _count_tokens(start, end, history_ptr, table_ptr, first, BLOCK_SIZE: tl.constexpr):
    """Returns how often each token of the tile that begins with token `first` has a position from `start` to
    `end`: int32 [TILE]."""
    counts = tl.zeros((TILE,), tl.int32)
    for at in range(start, end, CHUNK):
        position = at + tl.arange(0, CHUNK)
        there = position < end
        ptrs = token_ptrs(history_ptr, table_ptr, position, there, BLOCK_SIZE)
        counts = count_ids(counts, tl.load(ptrs, mask=there, other=-1), there, first, TILE)
    return counts


@triton.jit
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    fields_ptr,
    block_tables_ptr,
    history_ptr,
    logits_stride,
    tables_stride,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    k = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + k).to(tl.int64)
    if row < 0:
        return
    repetition = load_float(fields_ptr, row, REPETITION)
    presence = load_float(fields_ptr, row, PRESENCE)
    frequency = load_float(fields_ptr, row, FREQUENCY)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    num_prompt, end = load_option(fields_ptr, row, NUM_PROMPT), tl.load(positions_ptr + k) + 1
    table_ptr = block_tables_ptr + row * tables_stride
    first = tl.program_id(0) * TILE
    in_prompt = tl.zeros((TILE,), tl.int32)
    if repetition != 1.0:
        in_prompt = _count_tokens(0, num_prompt, history_ptr, table_ptr, first, BLOCK_SIZE)
    in_output = _count_tokens(num_prompt, end, history_ptr, table_ptr, first, BLOCK_SIZE)
    token = first + tl.arange(0, TILE)
    seen = (in_prompt + in_output > 0) & (token < V)
    ptr = logits_ptr + k * logits_stride + token
    logits = tl.load(ptr, mask=seen, other=0.0)
    logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
    logits -= frequency * in_output.to(tl.float32)
    logits -= tl.where(in_output > 0, presence, 0.0)
    tl.store(ptr, logits, mask=seen)


def penalize(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    _penalize_kernel[(cdiv(vocab_size, TILE.value), num_rows)](
        logits_KV,
        rows_K,
        positions_K,
        options.fields_RO,
        options.block_tables_RM,
        options.history,
        logits_KV.stride(0),
        options.block_tables_RM.stride(0),
        V=vocab_size,
        BLOCK_SIZE=options.history.shape[1],
        num_warps=8,
        # A product and a difference round one after the other, as they do in PyTorch.
        enable_fp_fusion=False,
    )
