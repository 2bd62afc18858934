"""Triton attention over a paged cache of latents, in the absorbed form: all heads read the same keys, and the
first C numbers of a key are its value, so one load of a tile serves both matmuls. Keys, and in the second
matmul the numbers of values, are the rows of the matmuls: Hopper's tensor cores want 64 or more, and a decode
has fewer heads.

A row is a query of one head. The rows of a sequence lie one after the other, head after head and query after
query, and a tile takes rows across both. So decodes and prefills are the same work: a decode of one token has
H rows. Programs split the keys of a tile where tiles alone would not fill the GPU, as in paged_attention.py.

The oracle and the dimensions are in reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shoal.kernels.attention.paged_attention import LOG2_E, LOWEST, AttentionTiles
from shoal.kernels.hopper import has_large_shared_memory
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2

MAX_TILE_ROWS = 32


def latent_tiles(num_rows: int | None, dtype: torch.dtype) -> AttentionTiles:
    """`num_rows`: a decode's queries times heads. None: prefills, which have one form of tiles, so that a
    start compiles it. An accumulator has a whole latent for each of a tile's rows, which bounds them."""
    if dtype == torch.float32:
        return AttentionTiles(16, 16, 8, 1)
    rows = max(16, min(next_power_of_2(num_rows or MAX_TILE_ROWS), MAX_TILE_ROWS))
    # Two programs of a decode share an SM of Hopper, and one loads while the other multiplies. Prefills need
    # more registers.
    shares = num_rows is not None and has_large_shared_memory()
    return AttentionTiles(rows, 32, 4 if rows == 16 or shares else 8, 3)


@triton.jit
def find_rows(starts_ptr, first_seq, num_seqs, tile, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the sequence of a tile, and the first of its rows that is in this tile, if a token has ROWS
    rows. The tiles of sequence i begin at (the rows before it) // BLOCK_M + i, which leaves room for each
    sequence's last tile."""
    base = tl.load(starts_ptr + first_seq)
    before = 0
    for chunk in range(0, num_seqs, 128):
        seqs = chunk + tl.arange(0, 128)
        starts = tl.load(starts_ptr + first_seq + seqs, mask=seqs < num_seqs, other=0)
        begins = (starts - base) * ROWS // BLOCK_M + seqs <= tile
        before += tl.sum((begins & (seqs < num_seqs)).to(tl.int32))
    index = before - 1
    seq = first_seq + index
    first_tile = (tl.load(starts_ptr + seq) - base) * ROWS // BLOCK_M + index
    return seq, (tile - first_tile) * BLOCK_M


def num_row_tiles(num_tokens: int, num_seqs: int, rows: int, block_m: int) -> int:
    """Returns the tiles that `find_rows` looks for, at most."""
    return num_tokens * rows // block_m + num_seqs


@triton.jit
def split_keys(num_keys, splits, min_split, KEYS: tl.constexpr):
    """The keys of a split, whole tiles of KEYS, and how many splits have some. Of no keys one has all."""
    length = tl.cdiv(tl.maximum(tl.cdiv(num_keys, splits), min_split), KEYS) * KEYS
    return length, tl.maximum(tl.cdiv(num_keys, length), 1)


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tiles", "splits", "min_split"],
    do_not_specialize_on_alignment=["starts_ptr", "kv_lens_ptr", "rows_ptr"],
)
def latent_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    starts_ptr,
    kv_lens_ptr,
    rows_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    scale_log2,
    stride_table,
    stride_block,
    first_seq,
    num_seqs,
    num_tiles,
    splits,
    min_split,
    H: tl.constexpr,
    C: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    LEAVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    C_PAD: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The grid is (tiles, splits). QUERIES > 0: each sequence has as many, and its tiles are as many as they
    take. 0: prefills, from `first_seq` on; tiles with most keys come first. A row of a query before position
    0, and of an empty place, gets zeros. LEAVES: partial results are left as they are, [splits, rows, C_PAD]
    and [splits, rows] for the rows of all decodes."""
    start_next(PDL)
    N: tl.constexpr = C + ROTARY
    task = tl.program_id(0)
    split = tl.program_id(1)
    if QUERIES > 0:
        TILES: tl.constexpr = (QUERIES * H + BLOCK_M - 1) // BLOCK_M
        seq = task // TILES
        first_row = task % TILES * BLOCK_M
        query_start = seq * QUERIES
        query_len = QUERIES
    else:
        seq, first_row = find_rows(starts_ptr, first_seq, num_seqs, num_tiles - 1 - task, H, BLOCK_M)
        query_start = tl.load(starts_ptr + seq)
        query_len = tl.load(starts_ptr + seq + 1) - query_start
        if first_row >= query_len * H:
            return
    kv_len = tl.load(kv_lens_ptr + seq, cache_modifier=".cg")
    row = tl.load(rows_ptr + seq, cache_modifier=".cg").to(tl.int64)
    first_pos = kv_len - query_len
    last_query = tl.minimum((first_row + BLOCK_M - 1) // H, query_len - 1)
    stop = tl.maximum(tl.minimum(first_pos + last_query + 1, kv_len), 0)
    split_len, active = split_keys(kv_len if LEAVES else stop, splits, min_split, BLOCK_N)
    if split >= active:
        return
    begin = split * split_len
    end = tl.minimum(begin + split_len, stop)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, C_PAD)
    rotary = tl.arange(0, ROTARY_PAD)
    columns = tl.arange(0, BLOCK_N)
    is_row = (first_row + rows < query_len * H)[None, :]
    positions = (first_pos + (first_row + rows) // H)[None, :]
    at = (query_start.to(tl.int64) * H + first_row + rows)[None, :]
    table_ptr += row * stride_table
    blocks = tl.load(
        table_ptr + (begin + columns) // BLOCK_SIZE, mask=begin + columns < end, other=0, cache_modifier=".cg"
    )
    wait_for_previous(PDL)
    q_c = tl.load(q_ptr + at * N + dims[:, None], mask=is_row & (dims < C)[:, None], other=0.0)
    q_r = tl.load(q_ptr + at * N + C + rotary[:, None], mask=is_row & (rotary < ROTARY)[:, None], other=0.0)
    acc = tl.zeros((C_PAD, BLOCK_M), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    for first in range(begin, end, BLOCK_N):
        keys = first + columns
        there = (keys < end)[:, None]
        key_ptr = cache_ptr + (blocks.to(tl.int64) * stride_block + keys % BLOCK_SIZE * N)[:, None]
        # The next tile's blocks are loaded while this tile is worked on, as in paged_attention.py.
        following = keys + BLOCK_N
        blocks = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        c = tl.load(key_ptr + dims[None, :], mask=there & (dims < C)[None, :], other=0.0)
        r = tl.load(key_ptr + C + rotary[None, :], mask=there & (rotary < ROTARY)[None, :], other=0.0)
        scores = tl.dot(c, q_c, input_precision="ieee")
        scores = tl.dot(r, q_r, scores, input_precision="ieee")
        visible = (keys[:, None] <= positions) & there
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp2(scores - new_highest[None, :])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(c), weights.to(c.dtype), acc * shrink[None, :], input_precision="ieee")
        highest = new_highest
    total = tl.where(total > 0, total, 1.0)  # a row that sees no key gives 0, with a tiny weight
    result = acc / total[None, :]
    out_mask = is_row & (dims < C)[:, None]
    if LEAVES:
        before = split.to(tl.int64) * (num_seqs * QUERIES * H)
        tl.store(partial_ptr + (before + at) * C_PAD + dims[:, None], result, mask=out_mask)
        own = first_row + rows
        lse = highest + tl.log2(total)
        tl.store(lse_ptr + before + query_start * H + own, lse, mask=own < query_len * H)
        return
    out_ptrs = out_ptr + at * C + dims[:, None]
    if active == 1:
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    slots = rows[None, :] * C_PAD + dims[:, None]
    partial_ptr += task.to(tl.int64) * splits * (BLOCK_M * C_PAD) + slots
    lse_ptr += task * splits * BLOCK_M + rows
    tl.store(partial_ptr + split * (BLOCK_M * C_PAD), result)
    tl.store(lse_ptr + split * BLOCK_M, highest + tl.log2(total))
    # All threads have stored before one of them says so (release), and that one has heard of the other
    # programs before any thread reads (acquire).
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + task, 1, sem="acq_rel", scope="gpu")
    if arrived == active - 1:
        tl.store(arrived_ptr + task, 0)
        tl.debug_barrier()
        acc = tl.zeros((C_PAD, BLOCK_M), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
        for part in range(active):
            lse = tl.load(lse_ptr + part * BLOCK_M, cache_modifier=".cg")
            partial = tl.load(partial_ptr + part * (BLOCK_M * C_PAD), cache_modifier=".cg")
            new_highest = tl.maximum(highest, lse)
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(lse - new_highest)
            acc = acc * shrink[None, :] + partial * weight[None, :]
            total = total * shrink + weight
            highest = new_highest
        tl.store(out_ptrs, (acc / total[None, :]).to(out_ptr.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True, slots=True)
class LatentWorkspace:
    """Memory for the partial results of tiles whose keys are split. Steps that share it must run one after
    the other."""

    partial: torch.Tensor  # fp32: normalised partial results
    lse: torch.Tensor  # fp32: the log2-sum-exp of each partial result
    arrived: torch.Tensor  # int32: how many programs of each tile are done; 0 between launches
    size: int  # numbers of a sum

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        num_tiles: int,
        size: int,
        device: torch.device,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> LatentWorkspace:
        """Room for partial results of `num_rows` rows together, and for `num_tiles` tiles that have some.
        holding: the region of memory for partial results."""
        with holding():
            size_pad = max(16, next_power_of_2(size))
            partial = torch.empty(num_rows * size_pad, dtype=torch.float32, device=device)
            lse = torch.empty(num_rows, dtype=torch.float32, device=device)
        return cls(partial, lse, torch.zeros(num_tiles, dtype=torch.int32, device=device), size)


class LatentParts(NamedTuple):
    """Sums of latents of a step's decodes as programs have left them, and how the keys were split."""

    partial: torch.Tensor
    lse: torch.Tensor
    kv_lens_S: torch.Tensor
    splits: int
    min_split: int
    keys: int  # A split is whole tiles of as many.
    queries: int


def latent_attention(
    q_THN: torch.Tensor,
    cache: LayerCache,
    out_THC: torch.Tensor | None,
    query_starts_S: torch.Tensor,
    kv_lens_S: torch.Tensor,
    rows_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    workspace: LatentWorkspace,
    scale: float,
    *,
    splits: int,
    min_split: int,
    num_seqs: int,
    queries: int = 0,
    first_seq: int = 0,
    num_tokens: int = 0,
) -> LatentParts | None:
    """Writes out_THC, the weighted sums of latents; without it, leaves their parts. With `queries`, these are
    of the first `num_seqs` sequences, which have as many tokens each, one sequence after the other. Without,
    of the `num_seqs` sequences from `first_seq` on, which have at most `num_tokens` tokens together."""
    num_heads, width = q_THN.shape[1:]
    size, block_size = workspace.size, cache.blocks.shape[3]
    assert q_THN.is_contiguous() and (queries if out_THC is None else out_THC.is_contiguous())
    assert block_tables_RM.stride(1) == 1
    assert cache.blocks.stride()[3:] == (width, 1)
    tiles = latent_tiles(queries * num_heads if queries else None, q_THN.dtype)
    if queries:
        num_tiles = num_seqs * cdiv(queries * num_heads, tiles.block_m)
    else:
        num_tiles = num_row_tiles(num_tokens, num_seqs, num_heads, tiles.block_m)
    size_pad = max(16, next_power_of_2(size))
    if splits > 1 or out_THC is None:
        assert num_tiles <= workspace.arrived.numel()
        assert num_tiles * splits * tiles.block_m * size_pad <= workspace.partial.numel()
    latent_kernel[(num_tiles, splits)](
        q_THN,
        cache.blocks,
        q_THN if out_THC is None else out_THC,
        query_starts_S,
        kv_lens_S,
        rows_S,
        block_tables_RM,
        workspace.partial,
        workspace.lse,
        workspace.arrived,
        scale * LOG2_E,
        block_tables_RM.stride(0),
        cache.blocks.stride(0),
        first_seq,
        num_seqs,
        num_tiles,
        splits,
        min_split,
        H=num_heads,
        C=size,
        ROTARY=width - size,
        BLOCK_SIZE=block_size,
        QUERIES=queries,
        LEAVES=out_THC is None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        C_PAD=size_pad,
        ROTARY_PAD=max(16, next_power_of_2(width - size)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # All programs of a step without prefills may leave early. Then none of them would wait.
        **(pdl_options() if queries else {"PDL": False, "launch_pdl": False}),
    )
    if out_THC is not None:
        return None
    return LatentParts(workspace.partial, workspace.lse, kv_lens_S, splits, min_split, tiles.block_n, queries)
