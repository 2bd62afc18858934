"""Cascade attention: keys that a decode group shares are read once, by tiles of many sequences' queries.

Its other half is decode_kernel (paged_attention.py), which works on each sequence's own keys at the same time
and combines the results. The grid is fixed when a graph is captured. Groups are read on the device
(kernels/state.py), where they may change with every step.

Shapes: S sequences, R state rows, M blocks of a sequence, H query heads, G kv heads, N head size; GROUP = H /
G is the number of query heads of a kv head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.attention.paged_attention import (
    LOG2_E,
    LOWEST,
    AttentionTiles,
    DecodeWorkspace,
    _attend_range,
    cache_bytes,
    chunk_tiles,
    queries_per_tile,
)
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.pdl import pdl_options, wait_then_start_next
from shoal.kernels.rounding import next_power_of_2
from shoal.kernels.state import MAX_DECODE_GROUPS, DecodeGroupField

START, COUNT = tl.constexpr(DecodeGroupField.START.value), tl.constexpr(DecodeGroupField.COUNT.value)
LENGTH, ROW = tl.constexpr(DecodeGroupField.LENGTH.value), tl.constexpr(DecodeGroupField.ROW.value)
DECODE_GROUP_FIELDS = tl.constexpr(len(DecodeGroupField))
MIN_PART = 256  # the fewest keys that are worth a part of their own


@triton.jit(
    do_not_specialize=["splits", "max_parts"],
    do_not_specialize_on_alignment=["scales_ptr", "decode_groups_ptr", "members_ptr"],
)
def prefix_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    decode_groups_ptr,
    members_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    parts_ptr,
    scale_log2,
    stride_q,
    stride_table,
    stride_block,
    stride_kv,
    stride_head,
    splits,
    max_parts,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_DECODE_GROUPS: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    FP8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    N_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Works on items. An item is BLOCK_Q queries of a decode group's members, the query heads of one kv head,
    and one part of the shared keys. Each member has QUERIES queries, which decode_kernel has in tiles of
    TILE_QUERIES. The grid may have any number of programs.

    The keys are split so finely that all groups together have at most one item for each program, and
    all items have about the same length.
    """
    wait_then_start_next(PDL)
    decode_groups = tl.arange(0, MAX_DECODE_GROUPS)
    starts = tl.load(decode_groups_ptr + decode_groups * DECODE_GROUP_FIELDS + START)
    counts = tl.load(decode_groups_ptr + decode_groups * DECODE_GROUP_FIELDS + COUNT)
    if QUERIES > 1:
        counts *= QUERIES
    lengths = tl.load(decode_groups_ptr + decode_groups * DECODE_GROUP_FIELDS + LENGTH)
    table_rows = tl.load(decode_groups_ptr + decode_groups * DECODE_GROUP_FIELDS + ROW)
    tiles = tl.cdiv(counts, BLOCK_Q)
    steps = tl.cdiv(lengths, BLOCK_N)
    work = tl.sum(tiles * steps, 0) * G
    if work == 0:
        return
    num_programs = tl.num_programs(0)
    parts = tl.minimum(tl.minimum(steps * num_programs // work, max_parts), steps // MIN_STEPS)
    part_steps = tl.maximum(tl.cdiv(steps, tl.maximum(parts, 1)), 1)
    parts = tl.cdiv(steps, part_steps)
    items = tiles * parts * G
    ends = tl.cumsum(items, 0)

    rows = tl.arange(0, BLOCK_M)
    heads = rows % GROUP
    dims = tl.arange(0, N_PAD)
    dim_mask = (dims < N)[None, :]
    for item in range(tl.program_id(0), tl.sum(items, 0), num_programs):
        mine = (ends - items <= item) & (item < ends)
        index = tl.sum(tl.where(mine, item - ends + items, 0), 0)
        num_parts = tl.sum(tl.where(mine, parts, 0), 0)
        part_len = tl.sum(tl.where(mine, part_steps, 0), 0) * BLOCK_N
        start = tl.sum(tl.where(mine, starts, 0), 0)
        count = tl.sum(tl.where(mine, counts, 0), 0)
        length = tl.sum(tl.where(mine, lengths, 0), 0)
        table_row = tl.sum(tl.where(mine, table_rows, 0), 0)
        kv_head = index % G
        part = index // G % num_parts
        queries = index // G // num_parts * BLOCK_Q + rows // GROUP
        there = (rows < BLOCK_Q * GROUP) & (queries < count)
        seqs = tl.load(members_ptr + start + queries // QUERIES, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & dim_mask
        tokens = seqs
        if QUERIES > 1:
            tokens = seqs * QUERIES + queries % QUERIES
        q = tl.load(
            q_ptr + (tokens * stride_q + (kv_head * GROUP + heads) * N)[:, None] + dims[None, :],
            mask=mask,
            other=0.0,
        )

        begin = part * part_len
        end = tl.minimum(begin + part_len, length)
        whole = begin + (end - begin) // BLOCK_N * BLOCK_N
        last_key = tl.zeros((BLOCK_M,), tl.int32) + (end - 1)
        keys_table_ptr = table_ptr + table_row.to(tl.int64) * stride_table
        k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_head
        scores_scale = scale_log2
        if FP8:
            scores_scale *= tl.load(scales_ptr + kv_head)
        acc = tl.zeros((BLOCK_M, N_PAD), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
        acc, total, highest = _attend_range(
            acc,
            total,
            highest,
            q,
            k_ptr,
            k_ptr + stride_kv,
            keys_table_ptr,
            last_key,
            begin,
            whole,
            scores_scale,
            stride_block,
            N,
            BLOCK_SIZE,
            0,
            False,
            BLOCK_N,
            N_PAD,
            True,
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
            k_ptr + stride_kv,
            keys_table_ptr,
            last_key,
            whole,
            end,
            scores_scale,
            stride_block,
            N,
            BLOCK_SIZE,
            0,
            False,
            BLOCK_N,
            N_PAD,
            True,
            True,
            FP8,
            SOFTCAP,
        )
        if FP8:
            acc *= tl.load(scales_ptr + G + kv_head)
        query_tiles = seqs
        query_rows = heads
        if QUERIES > 1:
            TILES: tl.constexpr = (QUERIES + TILE_QUERIES - 1) // TILE_QUERIES
            query_tiles = seqs * TILES + queries % QUERIES // TILE_QUERIES
            query_rows = queries % QUERIES % TILE_QUERIES * GROUP + heads
        TILE_ROWS: tl.constexpr = TILE_QUERIES * GROUP
        slots = ((query_tiles * G + kv_head) * (splits + max_parts) + splits + part) * TILE_ROWS + query_rows
        tl.store(partial_ptr + slots[:, None] * N + dims[None, :], acc / total[:, None], mask=mask)
        tl.store(lse_ptr + slots, highest + tl.log2(total), mask=there)
        if (kv_head == 0) & (part == 0):
            tl.store(parts_ptr + seqs, num_parts + tl.zeros((BLOCK_M,), tl.int32), mask=there & (heads == 0))


def prefix_attention(
    q_THN: torch.Tensor,
    cache: LayerCache,
    decode_groups: torch.Tensor,
    members_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    workspace: DecodeWorkspace,
    num_seqs: int,
    num_programs: int,
    splits: int,
    max_parts: int,
    scale: float,
    tiles: AttentionTiles | None = None,
    queries: int = 1,
    softcap: float | None = None,
) -> None:
    """Attends from the queries of all groups to the keys that each group shares, and leaves the results in
    the workspace, in at most `max_parts` parts. The members of groups are among the first `num_seqs`
    sequences. `decode_attention` must be launched next, with the same `cache`, `splits`, `max_parts` and
    `queries`."""
    kv_layer, scales_2G = cache.blocks, cache.scales_2G
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    group = q_THN.shape[1] // num_kv_heads
    assert (
        q_THN.stride()[1:] == (head_dim, 1)
        and kv_layer.stride()[3:] == (head_dim, 1)
        and block_tables_RM.stride(1) == 1
    )
    assert decode_groups.shape == (MAX_DECODE_GROUPS, len(DecodeGroupField)) and decode_groups.is_contiguous()
    tile_queries = queries_per_tile(group, queries, head_dim, q_THN.dtype)
    num_tiles = num_seqs * -(-queries // tile_queries)
    num_partials = num_tiles * num_kv_heads * (splits + max_parts) * tile_queries * group
    assert num_partials * head_dim <= workspace.partial.numel()
    tiles = tiles or chunk_tiles(head_dim, q_THN.dtype, scales_2G is not None)
    block_m = max(tiles.block_m, next_power_of_2(group))
    prefix_kernel[(num_programs,)](
        q_THN,
        cache_bytes(cache),
        decode_groups if scales_2G is None else scales_2G,  # not read without scales
        decode_groups,
        members_S,
        block_tables_RM,
        workspace.partial,
        workspace.lse,
        workspace.parts,
        scale * LOG2_E.value,
        q_THN.stride(0),
        block_tables_RM.stride(0),
        *kv_layer.stride()[:3],
        splits,
        max_parts,
        G=num_kv_heads,
        GROUP=group,
        N=head_dim,
        BLOCK_SIZE=block_size,
        MAX_DECODE_GROUPS=MAX_DECODE_GROUPS,
        MIN_STEPS=max(1, MIN_PART // tiles.block_n),
        FP8=scales_2G is not None,
        SOFTCAP=softcap or 0.0,
        QUERIES=queries,
        TILE_QUERIES=tile_queries,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_Q=block_m // group,
        N_PAD=max(16, next_power_of_2(head_dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
        **pdl_options(),
    )
