"""Functions that the kernels of row options share: a row's fields and lists, and its tokens. row_options.py
has the layout.

All these kernels are ordinary launches (pdl.py): they change logits in place, one after the other. A kernel
gets K rows, and a program of a row without the option returns at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shoal.kernels.sampling.row_options import Option

READS_HISTORY = tl.constexpr(Option.READS_HISTORY.value)
NUM_PROMPT = tl.constexpr(Option.NUM_PROMPT.value)
NUM_OPTIONS = tl.constexpr(len(Option))


@triton.jit
def load_option(fields_ptr, row, OPTION: tl.constexpr):
    return tl.load(fields_ptr + row * NUM_OPTIONS + OPTION)


@triton.jit
def load_list(fields_ptr, addresses_ptr, row, START: tl.constexpr):
    """Returns a pointer to a list of a row that has options, and the list's COUNT."""
    lists_ptr = tl.load(addresses_ptr + row).to(tl.pointer_type(tl.int32))
    return lists_ptr + load_option(fields_ptr, row, START), load_option(fields_ptr, row, START + 1)


@triton.jit
def load_float(fields_ptr, row, OPTION: tl.constexpr):
    return load_option(fields_ptr, row, OPTION).to(tl.float32, bitcast=True)


@triton.jit
def token_ptrs(history_ptr, block_table_ptr, position, mask, BLOCK_SIZE: tl.constexpr):
    """Returns where the tokens at these positions of a sequence lie. `block_table_ptr`: of its row."""
    block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return history_ptr + block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def ban_ids(row_ptr, ids, mask, V: tl.constexpr):
    """Makes these tokens of a row impossible."""
    tl.store(row_ptr + ids, float("-inf"), mask=mask & (ids >= 0) & (ids < V))
