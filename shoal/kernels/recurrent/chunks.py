"""Functions that the Triton kernels of recurrent layers share: where a chunk of a sequence lies among packed
tokens, the state row of a sequence, and small functions of gates."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv

CHUNK = 64  # tokens


class RuleTiles(NamedTuple):
    """Tile sizes of a kernel: numbers of a value in a program, its warps, stages of its pipeline."""

    values: int
    warps: int
    stages: int


def takes_chunks(dtype: torch.dtype) -> bool:
    """Says if prompts are computed in chunks. In float32 they are computed token by token, as matmuls
    of tensor cores either keep 11 bits of each number, or need three times the registers of a thread."""
    return dtype != torch.float32


def max_chunks(num_tokens: int, num_seqs: int, size: int) -> int:
    """Returns an upper bound of the chunks of sequences whose lengths only the device knows. Each sequence
    may have a last chunk that is not full."""
    return min(cdiv(num_tokens, size) + num_seqs, num_tokens)


@triton.jit
def find_chunk(chunk, starts_ptr, num_seqs, SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the sequence that has chunk number `chunk` of all, and which of its own chunks that is. Chunks
    begin at a sequence's own first token. `num_seqs` or more: there is no such chunk."""
    s = tl.arange(0, BLOCK_S)
    first = tl.load(starts_ptr + s, mask=s < num_seqs, other=0)
    last = tl.load(starts_ptr + s + 1, mask=s < num_seqs, other=0)
    ends = tl.cumsum((last - first + SIZE - 1) // SIZE, 0)
    before = ends <= chunk
    return tl.sum(before.to(tl.int32), 0), chunk - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def state_row(rows_ptr, seq, spare_row):
    """Returns the row of a sequence's states as 64 bits, as a row may be many megabytes."""
    row = tl.load(rows_ptr + seq)
    return tl.where(row < 0, spare_row, row).to(tl.int64)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)
