"""Copies of KV blocks by a kernel: one launch for all blocks, layers and heads.

The kernel reads and writes pinned host memory in place, over PCIe.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from shoal.kernels.copy.block_copy import Pieces
from shoal.kernels.rounding import cdiv, next_power_of_2

TILE_BYTES = 16 << 10  # A program of the kernel copies as many bytes.


@triton.jit(do_not_specialize=["num_pieces", "num_pairs", "src_block", "dst_block"])
def _copy_kernel(
    addresses_ptr,
    ids_ptr,
    num_pieces,
    num_pairs,
    src_block,
    dst_block,  # blocks in bytes
    src_0,
    src_1,
    src_2,
    dst_0,
    dst_1,
    dst_2,  # strides in words
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    RUN: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_tiles: tl.constexpr = (SIZE_0 * SIZE_1 * SIZE_2 + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (RUN + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    item = tl.program_id(0) // (row_tiles * column_tiles)
    piece, pair = item % num_pieces, item // num_pieces
    source = tl.load(addresses_ptr + piece) + tl.load(ids_ptr + pair) * src_block
    target = tl.load(addresses_ptr + num_pieces + piece) + tl.load(ids_ptr + num_pairs + pair) * dst_block
    # The alignment is stated of the pointers, because casts lose what is known of integers. Without it there
    # do not allow 16-byte loads.
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNED)
    target_ptr = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGNED)

    row = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    i, j, k = (
        (row // (SIZE_1 * SIZE_2)).to(tl.int64),
        (row // SIZE_2 % SIZE_1).to(tl.int64),
        (row % SIZE_2).to(tl.int64),
    )
    source_row = tl.multiple_of(i * src_0 + j * src_1 + k * src_2, VECTOR)
    target_row = tl.multiple_of(i * dst_0 + j * dst_1 + k * dst_2, VECTOR)
    mask = (row < SIZE_0 * SIZE_1 * SIZE_2)[:, None] & (column < RUN)[None, :]
    words = tl.load(source_ptr + source_row[:, None] + column[None, :], mask=mask)
    tl.store(target_ptr + target_row[:, None] + column[None, :], words, mask=mask)


WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


def copy_by_kernel(pieces: Pieces, addresses: torch.Tensor, ids: torch.Tensor) -> None:
    """Copies blocks on the current stream.

    `addresses` [2 * pieces] holds `pieces.src`, then `pieces.dst`. `ids` [2 * pairs] holds the blocks of the
    source, then of the destination. Both are int64 on the device. Host memory must be pinned.
    """
    word = min(8, pieces.word)
    run, rows = pieces.run // word, math.prod(pieces.sizes)
    columns = min(next_power_of_2(run), TILE_BYTES // word)
    tile_rows = min(next_power_of_2(rows), max(1, TILE_BYTES // word // columns))
    num_pieces, num_pairs = len(pieces.src), ids.shape[0] // 2
    grid = num_pairs * num_pieces * cdiv(rows, tile_rows) * cdiv(run, columns)
    if grid:
        _copy_kernel[(grid,)](
            addresses,
            ids,
            num_pieces,
            num_pairs,
            pieces.src_block,
            pieces.dst_block,
            *(stride // word for stride in (*pieces.src_strides, *pieces.dst_strides)),
            *pieces.sizes,
            RUN=run,
            WORD=WORDS[word],
            ALIGNED=pieces.word,
            VECTOR=pieces.word // word,
            ROWS=tile_rows,
            COLUMNS=columns,
            num_warps=4,
        )
