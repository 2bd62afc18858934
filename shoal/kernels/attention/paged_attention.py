"""Triton attention over the paged KV cache: one kernel for decode steps, one for (chunked) prefills.

Both put the query heads of one kv head into one tile, so that K and V are read once for all of them. Offsets
into the cache have 64 bits. The oracle is reference.py beside it. attention/triton.py launches these kernels
and owns their workspace. prefix_attention.py works on keys that several decodes share.

Numbers of an fp8 cache (FP8) become fp16 in registers, or fp32 for such queries. The way from e4m3 to bf16
goes through fp16 and takes four times as many instructions, which held decodes up more than memory did. So
queries and weights become fp16, too; queries beyond its 65,504 occur in no model. The scale of a head's
keys is multiplied into its scores' scale, and the scale of its values into the sum of values, once at the
end.

Shapes: T tokens, S sequences, R state rows, M blocks of a sequence, H query heads, G kv heads, N head size;
GROUP = H / G.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import has_large_shared_memory
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import next_power_of_2

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# A running maximum starts here. It is finite, so that a tile without any visible key adds 0 and not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
NARROW_WINDOW: tl.constexpr = tl.constexpr(128)  # keys of a window that is read at once


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tile sizes of a kernel: rows of queries, columns of keys, warps of a program, and stages of its
    pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; with fewer registers more programs share an SM


def decode_tiles(head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    # These matmuls have no tensor cores. Small tiles limit the unrolled code and its registers.
    if dtype == torch.float32:
        if head_dim > 256:
            return AttentionTiles(16, 16, 8, 1)
        return AttentionTiles(16, 32 if head_dim <= 64 else 16, 4, 2)
    if head_dim <= 64:
        return AttentionTiles(16, 64, 2, 2)
    if head_dim <= 128:
        return AttentionTiles(16, 32, 2, 3)
    # Three stages of larger heads would leave room for two programs on an SM, or for one.
    return AttentionTiles(16, 32, 2 if head_dim <= 256 else 4, 2)


def queries_per_tile(group: int, queries: int, head_dim: int, dtype: torch.dtype) -> int:
    """Returns the number of a decode's queries that share a tile, a row for each of their `group` heads. Each
    tile reads all keys. More rows take more registers, which tiles without tensor cores or with large heads
    lack."""
    most_rows = 64 if dtype != torch.float32 and head_dim <= 128 else 16
    return min(queries, max(1, most_rows // group))


def prefill_tiles(
    head_dim: int, dtype: torch.dtype, fp8: bool = False, window: int | None = None
) -> AttentionTiles:
    if dtype == torch.float32:
        if head_dim > 256:
            return AttentionTiles(16, 16, 8, 1)
        return AttentionTiles(32, 32, 4, 2) if head_dim <= 64 else AttentionTiles(32, 16, 8, 2)
    if head_dim <= 128:
        narrow = window is not None and window <= NARROW_WINDOW.value and head_dim <= 64
        return AttentionTiles(128, 32, 4, 3) if narrow else AttentionTiles(128, 64, 8, 3)
    if has_large_shared_memory() and not fp8:
        return AttentionTiles(128, 64, 8, 2) if head_dim <= 256 else AttentionTiles(64, 32, 8, 2)
    return large_head_tiles(head_dim, fp8)


def large_head_tiles(head_dim: int, fp8: bool) -> AttentionTiles:
    """The tiles of heads of more than 128 numbers that fit in any GPU's shared memory and registers. Numbers
    of an fp8 cache pass through registers."""
    if head_dim <= 256:
        return AttentionTiles(64, 32, 8, 2)
    return AttentionTiles(32, 32, 8, 2) if fp8 else AttentionTiles(64, 16, 8, 2)


def chunk_tiles(head_dim: int, dtype: torch.dtype, fp8: bool = False) -> AttentionTiles:
    """The tiles of prefills so short that their keys are split: more and smaller programs."""
    if dtype == torch.float32:
        return prefill_tiles(head_dim, dtype)
    return AttentionTiles(64, 64, 4, 3) if head_dim <= 128 else large_head_tiles(head_dim, fp8)


# ------------------------------------------------------------------------------------------
# shared by both kernels


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, IN_CHUNKS: tl.constexpr):
    """Returns the first key that a query at this position sees (LayerCache.first_key)."""
    if IN_CHUNKS:
        first = position // WINDOW * WINDOW
    else:
        first = tl.maximum(position + 1 - WINDOW, 0)
    return first


@triton.jit
def _in_window(keys, positions, WINDOW: tl.constexpr, IN_CHUNKS: tl.constexpr):
    if IN_CHUNKS:
        seen = keys >= positions // WINDOW * WINDOW
    else:
        seen = keys > positions - WINDOW
    return seen


@triton.jit
def _load_blocks(table_ptr, keys, end, BLOCK_SIZE: tl.constexpr):
    """Returns the cache block of each key of a tile.

    Loops load the blocks of the next tile while they work on this one. If an iteration loaded the addresses
    of its own K and V, Triton would pipeline the two loads one after the other, and K and V would be in
    flight for one iteration instead of num_stages - 1.
    """
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _cache_offsets(blocks, keys, stride_block, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    POWER_OF_2: tl.constexpr = BLOCK_SIZE & (BLOCK_SIZE - 1) == 0
    slots = keys & (BLOCK_SIZE - 1) if POWER_OF_2 else keys % BLOCK_SIZE
    return blocks.to(tl.int64) * stride_block + slots * N


@triton.jit
def _as_plain(x, FP8: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of the cache for matmuls with others, which are fp16 then, or fp32 if WIDE."""
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float32 if WIDE else tl.float16) if FP8 else x


@triton.jit
def _soft_cap(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(score / SOFTCAP) of scores for exp2, which are log2(e) times as large. tanh(x) is
    1 - 2 / (e^2x + 1), which is right for infinite powers, too."""
    return SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0))


@triton.jit
def _begin_softmax(
    sinks_ptr, heads, takes_sink, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, N_PAD: tl.constexpr
):
    """Returns acc, total and highest before the first key. A sink is a key without a value. One program of a
    query has it: `takes_sink`."""
    acc = tl.zeros((BLOCK_M, N_PAD), tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=takes_sink, other=0.0)
        total = tl.where(takes_sink, 1.0, 0.0)
        highest = tl.where(takes_sink, sinks * LOG2_E, LOWEST)
    else:
        total = tl.zeros((BLOCK_M,), tl.float32)
        highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    return acc, total, highest


@triton.jit
def _softmax_step(
    acc,
    total,
    highest,
    q,
    k,
    v,
    visible,
    scale_log2,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Works on one tile of online softmax. `total` is the sum of exp2(score - highest), and `acc` is the sum
    of values with these weights."""
    WIDE: tl.constexpr = tl.float32 == q.dtype
    k = _as_plain(k, FP8, WIDE)
    v = _as_plain(v, FP8, WIDE)
    q = q.to(k.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = _soft_cap(scores * scale_log2, SOFTCAP)
        scale_log2 = 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_highest


# ------------------------------------------------------------------------------------------ decode


@triton.jit
def _query_rows(
    rows,
    first_query,
    stride_query,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
):
    """Row r of a tile is head r % GROUP of query first_query + r // GROUP. Returns where the rows begin,
    counted from the sequence's first query, and whether there is such a row."""
    if QUERIES == 1:
        offsets = rows * N
        there = rows < GROUP
    else:
        queries = first_query + rows // GROUP
        offsets = queries * stride_query + rows % GROUP * N
        there = (rows < TILE_QUERIES * GROUP) & (queries < QUERIES)
    return offsets, there


@triton.jit
def _combine_splits(
    out_ptr,
    partial_ptr,
    lse_ptr,
    active,
    parts,
    splits,
    first_query,
    stride_out,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    N_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Combines the partial results of one (tile of queries, kv head): its `active` splits, then `parts` of
    a shared prefix, which lie behind the room for all `splits`. The order is fixed, so no bit depends on
    which program came last."""
    TILE_ROWS: tl.constexpr = TILE_QUERIES * GROUP
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, N_PAD)
    acc = tl.zeros((ROWS, N_PAD), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    for first in range(0, active + parts, CHUNK):
        results = first + tl.arange(0, CHUNK)
        there = (results < active + parts)[:, None] & (rows < TILE_ROWS)[None, :]
        if SHARED:
            results = tl.where(results < active, results, results - active + splits)
        slots = results[:, None] * TILE_ROWS + rows[None, :]
        # Other SMs wrote these, so they are read past this SM's L1 cache (.cg).
        lse = tl.load(lse_ptr + slots, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + slots[:, :, None] * N + dims[None, None, :],
            mask=there[:, :, None] & (dims < N)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(lse - new_highest[None, :])
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    result = acc / total[:, None]
    offsets, is_row = _query_rows(rows, first_query, stride_out, GROUP, N, QUERIES, TILE_QUERIES)
    tl.store(
        out_ptr + offsets[:, None] + dims[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dims < N)[None, :],
    )


@triton.jit(
    do_not_specialize=["splits", "max_parts", "min_split"],
    do_not_specialize_on_alignment=["scales_ptr", "sinks_ptr", "rows_ptr", "kv_lens_ptr"],
)
def decode_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    out_ptr,
    rows_ptr,
    kv_lens_ptr,
    prefix_lens_ptr,
    parts_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    scale_log2,
    stride_q,
    stride_table,
    stride_block,
    stride_kv,
    stride_head,
    splits,
    max_parts,
    min_split,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    LENGTHS: tl.constexpr,
    FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attends from the QUERIES query tokens of each sequence, its last ones. The grid is (G, splits, S *
    tiles): a tile has TILE_QUERIES of a sequence's queries, and at most `splits` programs share its keys
    evenly.

    The grid is fixed when a graph is captured, and lengths are read here. Programs beyond a length leave at
    once. A tile that needs one program writes its output directly. Otherwise each program leaves a
    normalised result and its log-sum-exp in the workspace. The last program to arrive, found by a counter,
    combines them and sets the counter back to 0, so there is no second launch.

    Lengths and block tables are constants of the step (pdl.py). They are read before the wait for the
    previous kernel.

    CUT > 0 is for a large batch, which fills the GPU without splits and comes in order of length. The grid is
    (G, 1, S + CUT * (splits - 1)). Only the first CUT sequences may be split, and only if they have more than
    1.5 times the mean's keys. A split has at least as many keys, and at least 1 / splits of the sequence's.
    The programs at the grid's end take all splits but the first; usually they have nothing to do. LENGTHS is
    a power of two of at least S, the same for all sizes of a batch.

    QUERIES > 1: a query sees the keys up to its own position, so programs may have rows that see none of
    their keys. A query before position 0 is padding and gets zeros.

    SHARED: the previous kernel must be prefix_kernel. It works on the first prefix_lens_ptr[seq] keys, and
    leaves their results in `parts_ptr[seq]` parts, while this kernel works on the other keys. The parts are
    combined with the splits. Queries are read before the wait, because prefix_kernel lets this kernel start
    when they are there.
    """
    start_next(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_seqs = tl.num_programs(2) - CUT * (splits - 1)
    if CUT > 0 and seq >= num_seqs:
        split = 1 + (seq - num_seqs) % (splits - 1)
        seq = (seq - num_seqs) // (splits - 1)
    num_kv_heads = tl.num_programs(0)
    tile = seq
    first_query = 0
    if QUERIES > 1:
        TILES: tl.constexpr = (QUERIES + TILE_QUERIES - 1) // TILE_QUERIES
        first_query = seq % TILES * TILE_QUERIES
        seq = seq // TILES
    kv_len = tl.load(kv_lens_ptr + seq, cache_modifier=".cg")
    row = tl.load(rows_ptr + seq, cache_modifier=".cg").to(tl.int64)

    # The tile's queries see keys [start, stop), and its first query is at first_pos.
    start = 0
    first_pos = kv_len - QUERIES + first_query
    stop = kv_len
    if QUERIES > 1:
        stop = tl.minimum(first_pos + TILE_QUERIES, kv_len)
    if WINDOW > 0:
        start = _first_key(tl.maximum(first_pos, 0), WINDOW, IN_CHUNKS)
    if SHARED:
        start = tl.minimum(tl.load(prefix_lens_ptr + seq, cache_modifier=".cg"), kv_len)
    if CUT > 0:
        least = kv_len
        if seq < CUT:
            each = tl.arange(0, LENGTHS)
            lens = tl.load(kv_lens_ptr + each, mask=each < num_seqs, other=0, cache_modifier=".cg")
            num_lens = tl.sum((lens > 0).to(tl.int32), axis=0)
            if WINDOW > 0:
                lens = tl.minimum(lens, WINDOW)
            if SHARED:
                lens -= tl.minimum(
                    tl.load(prefix_lens_ptr + each, mask=each < num_seqs, other=0, cache_modifier=".cg"), lens
                )
            least = tl.sum(lens, axis=0) // tl.maximum(num_lens, 1) * 3 // 2
        min_split = tl.maximum(min_split, least)
    begin = start
    end = stop
    active = 1
    if SPLIT:
        split_len = tl.cdiv(tl.maximum(tl.cdiv(stop - start, splits), min_split), BLOCK_N) * BLOCK_N
        active = tl.maximum(tl.cdiv(stop - start, split_len), 1)  # A padded row or tile sees no key.
        # It leaves without waiting, because the first split waits. The next kernel gets its registers at
        # once.
        if split >= active:
            return
        begin += split * split_len
        end = tl.minimum(begin + split_len, stop)

    rows = tl.arange(
        0, BLOCK_M
    )  # the tile's queries times the group's heads, at least 16 for a matrix product
    dims = tl.arange(0, N_PAD)
    dim_mask = (dims < N)[None, :]
    stride_out = num_kv_heads * GROUP * N
    out_offsets, is_row = _query_rows(rows, first_query, stride_out, GROUP, N, QUERIES, TILE_QUERIES)
    out_offsets = out_offsets[:, None] + dims[None, :]
    row_mask = is_row[:, None] & dim_mask
    out_ptr += (seq * QUERIES * num_kv_heads + kv_head).to(tl.int64) * GROUP * N
    if kv_len == 0:  # a padded row
        wait_for_previous(PDL)
        tl.store(out_ptr + out_offsets, tl.zeros((BLOCK_M, N_PAD), out_ptr.dtype.element_ty), mask=row_mask)
        return

    table_ptr += row * stride_table
    kv_ptr += kv_head.to(tl.int64) * stride_head
    if FP8:
        scale_log2 *= tl.load(scales_ptr + kv_head)
    acc, total, highest = _begin_softmax(
        sinks_ptr, kv_head * GROUP + rows % GROUP, is_row & (split == 0), HAS_SINKS, BLOCK_M, N_PAD
    )
    columns = tl.arange(0, BLOCK_N)
    blocks = tl.load(
        table_ptr + (begin + columns) // BLOCK_SIZE, mask=begin + columns < end, other=0, cache_modifier=".cg"
    )
    if not SHARED:
        wait_for_previous(PDL)
    q_offsets, _ = _query_rows(rows, first_query, stride_q, GROUP, N, QUERIES, TILE_QUERIES)
    q_offsets = q_offsets[:, None] + dims[None, :]
    q = tl.load(
        q_ptr + (seq * QUERIES).to(tl.int64) * stride_q + kv_head * GROUP * N + q_offsets,
        mask=row_mask,
        other=0.0,
    )
    query_pos = (first_pos + rows // GROUP)[:, None]
    for first in range(begin, end, BLOCK_N):
        keys = first + columns
        there = keys < end
        offsets = _cache_offsets(blocks, keys, stride_block, BLOCK_SIZE, N)[:, None] + dims[None, :]
        blocks = _load_blocks(table_ptr, keys + BLOCK_N, end, BLOCK_SIZE)
        mask = there[:, None] & dim_mask
        k = tl.load(kv_ptr + offsets, mask=mask, other=0)
        # It is masked, because an unused slot may hold NaN, and 0 * NaN is NaN.
        v = tl.load(kv_ptr + stride_kv + offsets, mask=mask, other=0)
        visible = there[None, :]
        if QUERIES > 1:
            visible &= keys[None, :] <= query_pos
            if WINDOW > 0:
                visible &= _in_window(keys[None, :], query_pos, WINDOW, IN_CHUNKS)
        acc, total, highest = _softmax_step(
            acc, total, highest, q, k, v, visible, scale_log2, True, FP8, SOFTCAP
        )
    if FP8:
        acc *= tl.load(scales_ptr + num_kv_heads + kv_head)
    if QUERIES > 1:
        total = tl.where(total > 0, total, 1.0)  # a row that sees no key gives 0, with a tiny weight
    TILE_ROWS: tl.constexpr = TILE_QUERIES * GROUP
    task = tile * num_kv_heads + kv_head
    room = splits
    if SHARED:
        room += max_parts
    partial_ptr += task.to(tl.int64) * room * TILE_ROWS * N
    lse_ptr += task.to(tl.int64) * room * TILE_ROWS
    slots = rows[:, None] * N + dims[None, :]
    parts = 0
    if SHARED:
        wait_for_previous(PDL)
        parts = tl.load(parts_ptr + seq, mask=start > 0, other=0, cache_modifier=".cg")
    if active == 1:
        if SHARED:  # The only program of a sequence combines the parts of the prefix itself.
            for part in tl.range(splits, splits + parts, loop_unroll_factor=4):
                lse = tl.load(
                    lse_ptr + part * TILE_ROWS + rows, mask=is_row, other=float("-inf"), cache_modifier=".cg"
                )
                partial = tl.load(
                    partial_ptr + part * TILE_ROWS * N + slots, mask=row_mask, other=0.0, cache_modifier=".cg"
                )
                new_highest = tl.maximum(highest, lse)
                shrink = tl.exp2(highest - new_highest)
                weight = tl.exp2(lse - new_highest)
                acc = acc * shrink[:, None] + partial * weight[:, None]
                total = total * shrink + weight
                highest = new_highest
        tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)
        return

    if SPLIT:
        result = acc / total[:, None]
        tl.store(partial_ptr + split * TILE_ROWS * N + slots, result, mask=row_mask)
        tl.store(lse_ptr + split * TILE_ROWS + rows, highest + tl.log2(total), mask=is_row)
        # All threads have stored before one of them says so (release), and that one has heard of the other
        # programs before any thread reads (acquire).
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + task, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            tl.store(arrived_ptr + task, 0)
            tl.debug_barrier()
            _combine_splits(
                out_ptr,
                partial_ptr,
                lse_ptr,
                active,
                parts,
                splits,
                first_query,
                stride_out,
                SHARED,
                GROUP,
                N,
                QUERIES,
                TILE_QUERIES,
                ROWS,
                N_PAD,
                CHUNK,
            )


def decode_attention(
    q_THN: torch.Tensor,
    cache: LayerCache,
    out_THN: torch.Tensor,
    rows_S: torch.Tensor,
    kv_lens_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    workspace: DecodeWorkspace,
    num_seqs: int,
    splits: int | None,
    scale: float,
    tiles: AttentionTiles | None = None,
    min_split: int = 64,
    prefix_lens_S: torch.Tensor | None = None,
    max_parts: int = 0,
    num_cut: int | None = None,
    queries: int = 1,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Writes out_THN of the queries of each sequence s < num_seqs: its last `queries` tokens, which are
    q_THN[s * queries] and the next ones.

    splits: the most programs that share a tile's keys. None: never several, so the kernel has no code for
    it. `min_split` is the fewest keys that are worth a program of their own. With `num_cut`, only the first
    `num_cut` sequences may be split, which should be the longest, and only if they have more than 1.5 times
    the mean's keys. That takes one query for each sequence.

    With `prefix_lens_S`, `prefix_attention` must have been launched just before, with the same `splits` and
    `max_parts`. It works on the first prefix_lens_S[s] keys.
    """
    kv_layer, scales_2G, window = cache.blocks, cache.scales_2G, cache.window
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    group = q_THN.shape[1] // num_kv_heads
    assert (
        q_THN.stride()[1:] == (head_dim, 1)
        and out_THN.is_contiguous()
        and kv_layer.stride()[3:] == (head_dim, 1)
    )
    tile_queries = queries_per_tile(group, queries, head_dim, q_THN.dtype)
    num_tiles = num_seqs * -(-queries // tile_queries)
    assert block_tables_RM.stride(1) == 1 and num_tiles * num_kv_heads <= workspace.arrived.numel()
    shared = prefix_lens_S is not None
    may_split, splits = splits is not None, splits or 1
    assert num_cut is None or (0 < num_cut <= num_seqs and queries == 1)
    assert not (shared and window) and (shared or max_parts == 0)
    num_partials = num_tiles * num_kv_heads * (splits + max_parts) * tile_queries * group
    assert splits + max_parts == 1 or num_partials * head_dim <= workspace.partial.numel()
    tiles = tiles or decode_tiles(head_dim, q_THN.dtype)
    head_dim_pad = max(16, next_power_of_2(head_dim))
    rows = next_power_of_2(tile_queries * group)
    grid = (
        (num_kv_heads, splits, num_tiles)
        if num_cut is None
        else (num_kv_heads, 1, num_seqs + num_cut * (splits - 1))
    )
    fp8 = scales_2G is not None
    decode_kernel[grid](
        q_THN,
        cache_bytes(cache),
        scales_2G if fp8 else rows_S,  # nobody looks at rows_S there
        sinks_H,
        out_THN,
        rows_S,
        kv_lens_S,
        prefix_lens_S if shared else rows_S,
        workspace.parts,
        block_tables_RM,
        workspace.partial,
        workspace.lse,
        workspace.arrived,
        scale * LOG2_E.value,
        q_THN.stride(0),
        block_tables_RM.stride(0),
        *kv_layer.stride()[:3],
        splits,
        max_parts,
        min_split,
        GROUP=group,
        N=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        IN_CHUNKS=cache.in_chunks,
        SHARED=shared,
        SPLIT=may_split,
        CUT=num_cut or 0,
        LENGTHS=next_power_of_2(workspace.arrived.numel() // num_kv_heads) if num_cut else 0,
        FP8=fp8,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks(sinks_H),
        QUERIES=queries,
        TILE_QUERIES=tile_queries,
        BLOCK_M=max(tiles.block_m, rows),
        BLOCK_N=tiles.block_n,
        N_PAD=head_dim_pad,
        ROWS=rows,
        # With a prefix, and in large batches, most programs combine few results, so a large tile would be
        # mostly masked. And its registers, which all programs have, leave room for fewer of them on an SM.
        CHUNK=max(2, (8192 if num_cut is None and not shared else 2048) // (rows * head_dim_pad)),
        num_warps=max(tiles.num_warps, min(rows // 8, 4)),
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
        **pdl_options(),
    )


def has_sinks(sinks_H: torch.Tensor | None) -> bool:
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
    return sinks_H is not None


def cache_bytes(cache: LayerCache) -> torch.Tensor:
    """The cache as kernels take it: fp8 numbers as bytes."""
    assert (cache.scales_2G is not None) == (cache.blocks.dtype == torch.float8_e4m3fn)
    return cache.blocks if cache.scales_2G is None else cache.blocks.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Memory for the partial results of split sequences, allocated once. Steps that share it must run one
    after the other."""

    partial: torch.Tensor  # fp32: normalised partial results
    lse: torch.Tensor  # fp32: the log2-sum-exp of each partial result
    arrived: torch.Tensor  # int32: how many programs of each (sequence, kv head) are done; 0 between launches
    parts: torch.Tensor  # int32: how many partial results of a shared prefix each sequence has

    @classmethod
    def allocate(
        cls,
        num_partials: int,
        num_tasks: int,
        head_dim: int,
        device: torch.device,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> DecodeWorkspace:
        """`num_partials` is the number of partial results, over all sequences, query heads, splits and parts.
        `num_tasks` is the number of sequences times kv heads. holding: the region of memory for
        partial results."""
        with holding():
            partial = torch.empty(num_partials * head_dim, dtype=torch.float32, device=device)
            lse = torch.empty(num_partials, dtype=torch.float32, device=device)
        return cls(
            partial,
            lse,
            torch.zeros(num_tasks, dtype=torch.int32, device=device),
            torch.zeros(num_tasks, dtype=torch.int32, device=device),
        )


# ------------------------------------------------------------------------------------------ prefill


@triton.jit
def _attend_range(
    acc,
    total,
    highest,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    query_pos,
    begin,
    end,
    scale_log2,
    stride_k,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_PAD: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Does online softmax over the keys [begin, end). Without MASKED, these must be whole tiles of keys, and
    every query must see all of them."""
    dims = tl.arange(0, N_PAD)
    columns = tl.arange(0, BLOCK_N)
    if PAGED:
        blocks = _load_blocks(table_ptr, begin + columns, end, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        keys = first + columns
        there = keys < end
        if PAGED:
            offsets = _cache_offsets(blocks, keys, stride_k, BLOCK_SIZE, N)
            blocks = _load_blocks(table_ptr, keys + BLOCK_N, end, BLOCK_SIZE)
        else:
            offsets = keys.to(tl.int64) * stride_k
        offsets = offsets[:, None] + dims[None, :]
        if MASKED or N != N_PAD:
            mask = there[:, None] & (dims < N)[None, :]
            k = tl.load(k_ptr + offsets, mask=mask, other=0)
            v = tl.load(v_ptr + offsets, mask=mask, other=0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        visible = there[None, :]
        if MASKED:
            visible = keys[None, :] <= query_pos[:, None]
            if WINDOW > 0:
                visible &= _in_window(keys[None, :], query_pos[:, None], WINDOW, IN_CHUNKS)
        acc, total, highest = _softmax_step(
            acc, total, highest, q, k, v, visible, scale_log2, MASKED, FP8, SOFTCAP
        )
    return acc, total, highest


@triton.jit
def _find_tile(starts_ptr, first_seq, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """Returns a tile's sequence, and the first of its queries that is in this tile.

    The tiles of sequence i begin at start_i // BLOCK_Q + i, where start_i is counted from the first prefill's
    start. So each sequence has room for at least ceil(length / BLOCK_Q) tiles, and a program finds its
    sequence by counting sequences that begin at or before its tile.
    """
    base = tl.load(starts_ptr + first_seq)
    before = 0
    for chunk in range(0, num_seqs, 128):
        seqs = chunk + tl.arange(0, 128)
        starts = tl.load(starts_ptr + first_seq + seqs, mask=seqs < num_seqs, other=0)
        begins = (starts - base) // BLOCK_Q + seqs <= tile
        before += tl.sum((begins & (seqs < num_seqs)).to(tl.int32))
    index = before - 1
    seq = first_seq + index
    return seq, (tile - index - (tl.load(starts_ptr + seq) - base) // BLOCK_Q) * BLOCK_Q


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tiles", "splits", "min_split"],
    do_not_specialize_on_alignment=["scales_ptr", "sinks_ptr", "starts_ptr", "kv_lens_ptr", "rows_ptr"],
)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    kv_lens_ptr,
    rows_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    scale_log2,
    stride_q,
    stride_table,
    stride_k,
    stride_v,
    stride_head,
    first_seq,
    num_seqs,
    num_tiles,
    splits,
    min_split,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    PAGED: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    N_PAD: tl.constexpr,
):
    """Attends from a tile of BLOCK_Q queries, with the GROUP query heads of one kv head. The grid is (G *
    num_tiles, splits), and a sequence's tiles with most keys come first.

    PAGED: keys and values come from the cache through the block table, and a chunk may follow a cached
    prefix. Otherwise every chunk is a whole sequence, and k and v are rows of the step's own projection.

    SPLIT: at most `splits` programs share the keys of a tile, at least `min_split` keys each. Few queries
    after a long prefix are few tiles, which would leave most of the GPU idle. Results are combined as in
    decode_kernel. The last program of a tile takes the keys that only some queries see, and others before
    these, so that every query sees some of each program's keys.
    """
    kv_head = tl.program_id(0) % G
    tile = num_tiles - 1 - tl.program_id(0) // G
    seq, first_query = _find_tile(starts_ptr, first_seq, num_seqs, tile, BLOCK_Q)
    query_start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - query_start
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    first_pos = kv_len - query_len + first_query
    # Keys [begin, middle) are in some windows only, [middle, diagonal) are seen by all queries, and
    # [diagonal, end) by some.
    middle = 0
    diagonal = (first_pos + 1) // BLOCK_N * BLOCK_N
    end = kv_len - query_len + tl.minimum(first_query + BLOCK_Q, query_len)
    split = tl.program_id(1)
    num_splits = 1
    if SPLIT:
        split_len = tl.cdiv(tl.maximum(tl.cdiv(diagonal, splits), min_split), BLOCK_N) * BLOCK_N
        num_splits = tl.maximum(tl.cdiv(diagonal, split_len), 1)
        if split >= num_splits:
            return
        middle = split * split_len
        if split < num_splits - 1:
            diagonal = middle + split_len
            end = diagonal

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, N_PAD)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    mask = is_row[:, None] & (dims < N)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    q = tl.load(q_ptr + (tokens * stride_q + heads * N)[:, None] + dims[None, :], mask=mask, other=0.0)
    query_pos = kv_len - query_len + queries

    if PAGED:
        table_ptr += tl.load(rows_ptr + seq).to(tl.int64) * stride_table
        k_ptr += kv_head.to(tl.int64) * stride_head
        v_ptr += kv_head.to(tl.int64) * stride_head + stride_v
    else:
        k_ptr += query_start.to(tl.int64) * stride_k + kv_head * stride_head
        v_ptr += query_start.to(tl.int64) * stride_k + kv_head * stride_head
    if FP8:
        scale_log2 *= tl.load(scales_ptr + kv_head)

    acc, total, highest = _begin_softmax(sinks_ptr, heads, is_row & (split == 0), HAS_SINKS, BLOCK_M, N_PAD)
    # A narrow window is one range, so that the next tiles are on their way.
    NARROW: tl.constexpr = WINDOW > 0 and WINDOW <= NARROW_WINDOW
    if WINDOW > 0:
        # Tiles begin with the first key of a window, because blocks before it may be other sequences' by now.
        begin = _first_key(first_pos, WINDOW, IN_CHUNKS)
        middle = begin + tl.cdiv(_first_key(end - 1, WINDOW, IN_CHUNKS) - begin, BLOCK_N) * BLOCK_N
        diagonal = middle + tl.maximum(first_pos + 1 - middle, 0) // BLOCK_N * BLOCK_N
        if NARROW:
            middle = end
        acc, total, highest = _attend_range(
            acc,
            total,
            highest,
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            query_pos,
            begin,
            tl.minimum(middle, end),
            scale_log2,
            stride_k,
            N,
            BLOCK_SIZE,
            WINDOW,
            IN_CHUNKS,
            BLOCK_N,
            N_PAD,
            PAGED,
            True,
            FP8,
            SOFTCAP,
        )
    if not NARROW:
        acc, total, highest = _attend_range(
            acc,
            total,
            highest,
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            query_pos,
            middle,
            diagonal,
            scale_log2,
            stride_k,
            N,
            BLOCK_SIZE,
            WINDOW,
            IN_CHUNKS,
            BLOCK_N,
            N_PAD,
            PAGED,
            False,
            FP8,
            SOFTCAP,
        )
        acc, total, highest = _attend_range(
            acc,
            total,
            highest,
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            query_pos,
            diagonal,
            end,
            scale_log2,
            stride_k,
            N,
            BLOCK_SIZE,
            WINDOW,
            IN_CHUNKS,
            BLOCK_N,
            N_PAD,
            PAGED,
            True,
            FP8,
            SOFTCAP,
        )
    if FP8:
        acc *= tl.load(scales_ptr + G + kv_head)
    result = acc / total[:, None]
    out_ptrs = out_ptr + (tokens * (G * GROUP * N) + heads * N)[:, None] + dims[None, :]
    if num_splits == 1:
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        return
    if SPLIT:
        task = tl.program_id(0)
        partial_ptr += task * splits * (BLOCK_M * N_PAD) + rows[:, None] * N_PAD + dims[None, :]
        lse_ptr += task * splits * BLOCK_M + rows
        tl.store(partial_ptr + split * (BLOCK_M * N_PAD), result)
        tl.store(lse_ptr + split * BLOCK_M, highest + tl.log2(total))
        # All threads have stored before one of them says so (release), and that one has heard of the other
        # programs before any thread reads (acquire).
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + task, 1, sem="acq_rel", scope="gpu")
        if arrived == num_splits - 1:
            tl.store(arrived_ptr + task, 0)
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_M, N_PAD), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
            for part in range(num_splits):
                lse = tl.load(lse_ptr + part * BLOCK_M, cache_modifier=".cg")
                partial = tl.load(partial_ptr + part * (BLOCK_M * N_PAD), cache_modifier=".cg")
                new_highest = tl.maximum(highest, lse)
                shrink = tl.exp2(highest - new_highest)
                weight = tl.exp2(lse - new_highest)
                acc = acc * shrink[:, None] + partial * weight[:, None]
                total = total * shrink + weight
                highest = new_highest
            result = acc / total[:, None]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q_THN: torch.Tensor,
    k_TGN: torch.Tensor | None,
    v_TGN: torch.Tensor | None,
    cache: LayerCache,
    out_THN: torch.Tensor,
    query_starts_S: torch.Tensor,
    kv_lens_S: torch.Tensor,
    rows_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    first_seq: int,
    num_tokens: int,
    scale: float,
    *,
    paged: bool,
    tiles: AttentionTiles | None = None,
    splits: int = 1,
    min_split: int = 512,
    workspace: PrefillWorkspace | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Writes out_THN for the sequences from `first_seq` on. They have at most `num_tokens` queries together.

    With `paged`, keys and values are read from the cache, as a cache of fp8 numbers takes. Otherwise they are
    read from k_TGN and v_TGN, which must then hold everything that a query may see.

    With `splits` > 1 as many programs share the keys of a tile of queries, at least `min_split` keys each.
    That takes a workspace with room for `num_prefill_tasks` times `splits` tiles, and no window.
    """
    kv_layer, scales_2G, window = cache.blocks, cache.scales_2G, cache.window
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    group = q_THN.shape[1] // num_kv_heads
    assert (
        q_THN.stride()[1:] == (head_dim, 1)
        and out_THN.is_contiguous()
        and kv_layer.stride()[3:] == (head_dim, 1)
    )
    assert block_tables_RM.stride(1) == 1
    if tiles is None and splits == 1:
        tiles = prefill_tiles(head_dim, q_THN.dtype, scales_2G is not None, window)
    elif tiles is None:
        tiles = chunk_tiles(head_dim, q_THN.dtype, scales_2G is not None)
    block_m = max(tiles.block_m, next_power_of_2(group))
    num_seqs = kv_lens_S.shape[0] - first_seq
    num_tasks = num_prefill_tasks(num_tokens, num_seqs, num_kv_heads, block_m // group)
    head_dim_pad = max(16, next_power_of_2(head_dim))
    fp8 = scales_2G is not None
    assert paged or not fp8
    if paged:
        k = v = cache_bytes(cache)
    else:
        assert k_TGN is not None and v_TGN is not None
        assert k_TGN.stride() == v_TGN.stride() and k_TGN.stride(2) == 1
        k, v = k_TGN, v_TGN
    partial = lse = arrived = rows_S  # nobody looks at them
    if splits > 1:
        assert workspace is not None and window is None and num_tasks <= workspace.arrived.numel()
        assert num_tasks * splits * block_m * head_dim_pad <= workspace.partial.numel()
        partial, lse, arrived = workspace.partial, workspace.lse, workspace.arrived
    prefill_kernel[(num_tasks, splits)](
        q_THN,
        k,
        v,
        scales_2G if fp8 else rows_S,
        sinks_H,
        out_THN,
        query_starts_S,
        kv_lens_S,
        rows_S,
        block_tables_RM,
        partial,
        lse,
        arrived,
        scale * LOG2_E.value,
        q_THN.stride(0),
        block_tables_RM.stride(0),
        k.stride(0),
        k.stride(1),
        kv_layer.stride(2) if paged else k.stride(1),
        first_seq,
        num_seqs,
        num_tasks // num_kv_heads,
        splits,
        min_split,
        G=num_kv_heads,
        GROUP=group,
        N=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        IN_CHUNKS=cache.in_chunks,
        PAGED=paged,
        SPLIT=splits > 1,
        FP8=fp8,
        SOFTCAP=softcap or 0.0,
        HAS_SINKS=has_sinks(sinks_H),
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_Q=block_m // group,
        N_PAD=head_dim_pad,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
    )


def num_prefill_tasks(num_tokens: int, num_seqs: int, num_kv_heads: int, block_q: int) -> int:
    """Returns the largest number of (tile of queries, kv head) if `num_seqs` sequences have at most
    `num_tokens` queries together, in tiles of `block_q`."""
    return num_kv_heads * (num_tokens // block_q + num_seqs)


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Memory for the partial results of tiles whose keys are split. Steps that share it must run one after
    the other."""

    partial: torch.Tensor  # fp32: normalised partial results
    lse: torch.Tensor  # fp32: the log2-sum-exp of each partial result
    arrived: torch.Tensor  # int32: how many programs of each task are done; 0 between launches

    @classmethod
    def allocate(
        cls,
        num_partials: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
        fp8: bool = False,
    ) -> PrefillWorkspace:
        """`num_partials` is the most partial results of a step, over all tasks and splits. `group` is the
        number of query heads for each kv head. holding: the region of memory for partial results."""
        rows = num_partials * chunk_rows(group, head_dim, dtype, fp8)
        with holding():
            partial = torch.empty(
                rows * max(16, next_power_of_2(head_dim)), dtype=torch.float32, device=device
            )
            lse = torch.empty(rows, dtype=torch.float32, device=device)
        return cls(partial, lse, torch.zeros(num_partials, dtype=torch.int32, device=device))


def chunk_rows(group: int, head_dim: int, dtype: torch.dtype, fp8: bool = False) -> int:
    """Rows of a tile of a prefill whose keys are split: its queries times the heads of their group."""
    return max(chunk_tiles(head_dim, dtype, fp8).block_m, next_power_of_2(group))
