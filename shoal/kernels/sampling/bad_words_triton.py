"""bad_words.py in Triton. Each thread compares one word with the end of the answer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import NUM_PROMPT, ban_ids, load_list, load_option, token_ptrs

WORDS_START = tl.constexpr(Option.WORDS_START.value)
CHUNK = tl.constexpr(128)  # words at once


@triton.jit
def _ban_words_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    fields_ptr,
    addresses_ptr,
    block_tables_ptr,
    history_ptr,
    logits_stride,
    tables_stride,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    k = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + k).to(tl.int64)
    if row < 0:
        return
    ends_ptr, count = load_list(fields_ptr, addresses_ptr, row, WORDS_START)
    num_prompt, end = load_option(fields_ptr, row, NUM_PROMPT), tl.load(positions_ptr + k) + 1
    table_ptr = block_tables_ptr + row * tables_stride
    words_ptr = ends_ptr + count
    for first in range(0, count, CHUNK):
        i = first + tl.arange(0, CHUNK)
        there = i < count
        word_start = tl.load(ends_ptr + i - 1, mask=there & (i > 0), other=0)
        word_end = tl.load(ends_ptr + i, mask=there, other=1)
        before = word_end - word_start - 1  # tokens that the answer must end with
        matches = there & (end - before >= num_prompt)
        longest = tl.max(tl.where(matches, before, 0), axis=0)
        for j in range(longest):
            compared = matches & (j < before)
            ptrs = token_ptrs(history_ptr, table_ptr, end - before + j, compared, BLOCK_SIZE)
            wanted = tl.load(words_ptr + word_start + j, mask=compared, other=0)
            matches = matches & ((compared == 0) | (tl.load(ptrs, mask=compared, other=0) == wanted))
        ids = tl.load(words_ptr + word_end - 1, mask=matches, other=-1)
        ban_ids(logits_ptr + k * logits_stride, ids, matches, V)


def ban_words(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    _ban_words_kernel[(num_rows,)](
        logits_KV,
        rows_K,
        positions_K,
        options.fields_RO,
        options.addresses_R,
        options.block_tables_RM,
        options.history,
        logits_KV.stride(0),
        options.block_tables_RM.stride(0),
        V=vocab_size,
        BLOCK_SIZE=options.history.shape[1],
        num_warps=4,
    )
