"""penalties.py in Triton.

Two passes over a sequence's tokens. The first one counts each token, in memory that has a place for each
token of the vocabulary. In the second one the first thread at a token takes its count, leaves zero, and
changes the logit. So only the tokens that a sequence has are touched, and the counts are zero again for the
next call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option, RowOptions
from shoal.kernels.sampling.row_options_triton import NUM_PROMPT, load_float, load_option, token_ptrs

REPETITION, PRESENCE = tl.constexpr(Option.REPETITION.value), tl.constexpr(Option.PRESENCE.value)
FREQUENCY = tl.constexpr(Option.FREQUENCY.value)
PROGRAMS = tl.constexpr(16)  # programs that share a row
CHUNK = tl.constexpr(256)  # tokens of a program at once
IN_PROMPT = tl.constexpr(1 << 30)  # a bit of a count; the others count the output


@triton.jit
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    fields_ptr,
    block_tables_ptr,
    history_ptr,
    counts_ptr,
    logits_stride,
    tables_stride,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    APPLIES: tl.constexpr,
):
    """The first pass, or the second, which `APPLIES` the penalties."""
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
    first = tl.where(repetition == 1.0, num_prompt, 0)  # Repetition alone looks at the prompt.
    for start in range(first + tl.program_id(0) * CHUNK, end, PROGRAMS * CHUNK):
        position = start + tl.arange(0, CHUNK)
        there = position < end
        token = tl.load(token_ptrs(history_ptr, table_ptr, position, there, BLOCK_SIZE), mask=there, other=-1)
        there &= (token >= 0) & (token < V)
        count_ptr = counts_ptr + k * V + token
        if APPLIES:
            count = tl.atomic_xchg(count_ptr, 0, mask=there, sem="relaxed")
            taken = there & (count != 0)
            in_output = count & (IN_PROMPT - 1)
            ptr = logits_ptr + k * logits_stride + token
            logits = tl.load(ptr, mask=taken, other=0.0)
            logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
            logits -= frequency * in_output.to(tl.float32)
            logits -= tl.where(in_output > 0, presence, 0.0)
            tl.store(ptr, logits, mask=taken)
        else:
            tl.atomic_or(count_ptr, IN_PROMPT, mask=there & (position < num_prompt), sem="relaxed")
            tl.atomic_add(count_ptr, 1, mask=there & (position >= num_prompt), sem="relaxed")


def penalize(
    logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
) -> None:
    assert logits_KV.dtype == torch.float32 and logits_KV.stride(1) == 1
    num_rows, vocab_size = logits_KV.shape
    for applies in (False, True):
        _penalize_kernel[(PROGRAMS.value, num_rows)](
            logits_KV,
            rows_K,
            positions_K,
            options.fields_RO,
            options.block_tables_RM,
            options.history,
            options.counts_KV,
            logits_KV.stride(0),
            options.block_tables_RM.stride(0),
            V=vocab_size,
            BLOCK_SIZE=options.history.shape[1],
            APPLIES=applies,
            num_warps=4,
            # A product and a difference round one after the other, as they do in PyTorch.
            enable_fp_fusion=False,
        )
