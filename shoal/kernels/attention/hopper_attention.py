"""Prefill attention on Hopper: FlashAttention 3 over the paged cache, in Gluon (Triton's language of warps
and layouts).

FlashAttention 3 (Shah et al. 2024): a producer warp has the copy engine (TMA) fetch queries, keys and values
into shared memory, and two warpgroups of 64 rows compute. A warpgroup sets out for the scores of the next
tile of keys before it adds the values of this one, so that its softmax runs beside the tensor cores. The two
take turns at setting out, so that one's softmax meets the other's matmuls.

Work is a list of items, tiles of queries times heads, those with most keys first. A program stays on its SM
and takes item after item from a counter. Its producer fetches for the next item while the last one ends. A
cache block of 16 tokens of one head lies in one run, so that TMA fetches 64 dims of it with one
instruction.

With heads of 512 numbers the sums of 64 rows fill the registers of two warpgroups. These share the rows then:
both compute all scores, and each sums half of the values' columns. With a window, tiles begin with the first
key that an item sees.

Figures are in benchmarks/results/kernels.md. The oracle is reference.py beside it. Shapes as in
paged_attention.py.
A line is one token's N numbers of K or V of one head in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.kernels.attention.paged_attention import LOG2_E, has_sinks
from shoal.kernels.hopper import barrier, is_hopper

ROWS: gl.constexpr = gl.constexpr(64)  # (query, head) pairs of a warpgroup
STAGES: gl.constexpr = gl.constexpr(2)  # tiles of keys, and of values, in shared memory
# numbers of 16 bits in 128 bytes, which tensor cores and TMA swizzle as one row
PANEL: gl.constexpr = gl.constexpr(64)
ONE_WARP: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WARPGROUP: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BOX = 16  # a TMA box: lines that one instruction fetches, if a cache block has as many
TILE_LAYOUT, QUERY_LAYOUT = (gl.NVMMASharedLayout(128, 16, rank) for rank in (2, 3))


def is_supported(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128, 256, 512)
        and softcap is None
    )


def takes_blocks(kv_layer: torch.Tensor) -> bool:
    """Says if boxes tile the blocks, [blocks, 2, G, block_size, N], and all strides are whole lines."""
    num_blocks, _, _, block_size, head_dim = kv_layer.shape
    return (
        block_size >= 8
        and block_size % min(block_size, BOX) == 0
        and all(stride % head_dim == 0 for stride in kv_layer.stride()[:3])
        and num_blocks * kv_layer.stride(0) // head_dim < 2**31  # TMA's coordinates
    )


@gluon.jit
def _first_key(first_pos, window, WINDOWED: gl.constexpr, BOX: gl.constexpr):
    """Returns where an item's tiles of keys begin: with the box that has the first key which its first query
    sees. Blocks before a window may be other sequences'."""
    first = first_pos * 0
    if WINDOWED:
        first = gl.maximum(first_pos - (window - 1), 0) // BOX * BOX
    return first


@gluon.jit
def _write(note, first_token, num_queries, first_pos, head):
    """Publishes the next item to the other warps. No queries: all items are done."""
    note.index(0).store(gl.full([1], first_token, gl.int32, ONE_WARP))
    note.index(1).store(gl.full([1], num_queries, gl.int32, ONE_WARP))
    note.index(2).store(gl.full([1], first_pos, gl.int32, ONE_WARP))
    note.index(3).store(gl.full([1], head, gl.int32, ONE_WARP))


@gluon.jit
def _read(note):
    first_token = gl.max(note.index(0).load(WARPGROUP), 0)
    num_queries = gl.max(note.index(1).load(WARPGROUP), 0)
    first_pos = gl.max(note.index(2).load(WARPGROUP), 0)
    return first_token, num_queries, first_pos, gl.max(note.index(3).load(WARPGROUP), 0)


@gluon.jit
def _fetch(
    q_desc,
    kv_desc,
    kv_ptr,
    work_ptr,
    taken_ptr,
    rows_ptr,
    table_ptr,
    shared,
    num_tiles,
    num_items,
    stride_table,
    block_lines,
    kv_lines,
    head_lines,
    num_lines,
    window,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """The work of the producer warp. A cache block is fetched in boxes. What no query may see becomes
    zeros."""
    note, q_smem, k_smem, v_smem, q_bars, kv_bars, _turns = shared
    q_ready, q_free = q_bars
    k_ready, k_free, v_ready, v_free = kv_bars
    PANELS: gl.constexpr = N // PANEL
    BLOCK_N: gl.constexpr = k_smem.type.shape[1]
    BOXES: gl.constexpr = BLOCK_N // BOX
    TILE_BYTES: gl.constexpr = BLOCK_N * N * 2
    dtype: gl.constexpr = k_smem.dtype
    ROW_TILES: gl.constexpr = q_smem.type.shape[0]
    q_parts = q_smem._reinterpret(dtype, [ROW_TILES * PANELS, ROWS // HEADS, HEADS, PANEL], q_desc.layout)
    k_parts = k_smem._reinterpret(dtype, [STAGES * PANELS * BOXES, BOX, PANEL], kv_desc.layout)
    v_parts = v_smem._reinterpret(dtype, [STAGES * PANELS * BOXES, BOX, PANEL], kv_desc.layout)
    item = gl.program_id(0)
    turn = 0
    count = 0
    while item < num_items:
        tile_ptr = work_ptr + item % num_tiles * 4
        first_token = gl.load(tile_ptr)
        num_queries = gl.load(tile_ptr + 1)
        first_pos = gl.load(tile_ptr + 2)
        blocks_ptr = table_ptr + gl.load(rows_ptr + gl.load(tile_ptr + 3)).to(gl.int64) * stride_table
        end = first_pos + num_queries
        head = item // num_tiles * HEADS
        head_line = head // GROUP * head_lines

        mbarrier.wait(q_free, (turn & 1) ^ 1)
        _write(note, first_token, num_queries, first_pos, head)
        mbarrier.expect(q_ready, ROW_TILES * ROWS * N * 2)
        for row_tile in gl.static_range(ROW_TILES):
            for panel in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    q_desc,
                    [first_token + row_tile * (ROWS // HEADS), head, panel * PANEL],
                    q_ready,
                    q_parts.index(row_tile * PANELS + panel),
                )
        begin = _first_key(first_pos, window, WINDOWED, BOX)
        for tile in range(gl.cdiv(end - begin, BLOCK_N)):
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            part = stage * PANELS * BOXES
            first = begin + tile * BLOCK_N
            lines = ()
            for box in gl.static_range(BOXES):
                key = first + box * BOX
                block = gl.load(blocks_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
                line = block * block_lines + head_line + key % BLOCK_SIZE
                line = gl.where(key < end, line, num_lines)  # num_lines: outside, which TMA fills with zeros
                lines = lines + (line,)  # type: ignore[assignment]

            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), TILE_BYTES)
            for box in gl.static_range(BOXES):
                for panel in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        kv_desc,
                        [lines[box], panel * PANEL],
                        k_ready.index(stage),
                        k_parts.index(part + panel * BOXES + box),
                    )

            mbarrier.wait(v_free.index(stage), phase)
            # Slots from `end` on may hold anything, also NaN, which a weight of 0 does not undo. So TMA does
            # not fetch the box with `end` in it.
            cut = gl.minimum(end - first, BLOCK_N) // BOX
            whole = (end % BOX == 0) | (cut == BOXES)
            if whole:
                mbarrier.expect(v_ready.index(stage), TILE_BYTES)
            else:
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
                key = first + cut * BOX
                line = (
                    gl.load(blocks_ptr + key // BLOCK_SIZE) * block_lines
                    + head_line
                    + key % BLOCK_SIZE
                    + kv_lines
                )
                slots = gl.arange(0, BOX, gl.SliceLayout(1, layout))
                offsets = slots[:, None] * N + gl.arange(0, PANEL, gl.SliceLayout(0, layout))[None, :]
                for panel in gl.static_range(PANELS):
                    values = gl.load(
                        kv_ptr + line.to(gl.int64) * N + panel * PANEL + offsets,
                        mask=(key + slots < end)[:, None],
                        other=0.0,
                    )
                    v_parts.index(part + panel * BOXES + cut).store(values)
                fence_async_shared()
                barrier()  # One thread speaks for all.
                mbarrier.expect(v_ready.index(stage), TILE_BYTES - BOX * N * 2)
            for box in gl.static_range(BOXES):
                for panel in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        kv_desc,
                        [lines[box] + kv_lines, panel * PANEL],
                        v_ready.index(stage),
                        v_parts.index(part + panel * BOXES + box),
                        pred=whole | (cut != box),
                    )
            count += 1
        taken = gl.atomic_add(taken_ptr, 1, sem="relaxed")
        if taken == num_items - 1:  # Every program has asked for the last time.
            gl.store(taken_ptr, 0)
        item = taken + gl.num_programs(0)
        turn += 1
    mbarrier.wait(q_free, (turn & 1) ^ 1)
    _write(note, 0, 0, 0, 0)
    mbarrier.arrive(q_ready)


@gluon.jit
def _await(ready, count, pred=True):
    """Waits until tile `count` is there."""
    mbarrier.wait(ready.index(count % STAGES), count // STAGES & 1, pred=pred)


@gluon.jit
def _values(v_smem, count, HALF: gl.constexpr):
    """The values of key tile `count`, or where warpgroups share their rows, this one's columns of them."""
    PARTS: gl.constexpr = v_smem.type.shape[0] // STAGES
    return v_smem.index(count % STAGES * PARTS + HALF % PARTS)


@gluon.jit
def _scores(q, k_smem, count, layout: gl.constexpr):
    """Sets out for the scores of key tile `count`."""
    zeros = gl.full([q.type.shape[0], k_smem.type.shape[1]], 0.0, gl.float32, layout)
    return warpgroup_mma(q, k_smem.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    scores, highest, total, first, positions, window, scale_log2, MASKED: gl.constexpr, WINDOWED: gl.constexpr
):
    """Online softmax of the keys from `first` on. Returns weights, highest, total, and what the sums so far
    must be multiplied by."""
    if MASKED:
        # Counted from the tile's first key, so that keys are constants in the comparisons.
        keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
        last = positions[:, None] - first
        seen = keys <= last
        if WINDOWED:
            seen = seen & (keys > last - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale_log2)
    shrink = gl.exp2(highest - new_highest)
    weights = gl.exp2(scores * scale_log2 - new_highest[:, None])
    return weights, new_highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights rounded, as the left operand of a matmul. They are rounded pair by pair, as LLVM would
    move single conversions to where they are used."""
    if dtype == gl.bfloat16:
        operand = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.bfloat16, True, 2
        )
    else:
        operand = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], gl.float16, True, 2
        )
    return gl.convert_layout(operand, layout)


@gluon.jit
def _tiles(
    acc,
    weights,
    highest,
    total,
    begin,
    end,
    tiles,
    first_key,
    count,
    step,
    q,
    k_smem,
    v_smem,
    kv_bars,
    turns,
    positions,
    window,
    scale_log2,
    MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    HALF: gl.constexpr,
    scores_layout: gl.constexpr,
    weights_layout: gl.constexpr,
):
    """Works on the key tiles [begin, end) of an item of `tiles`, of which the first begins with `first_key`.
    `weights` belong to tile begin - 1, whose values are still to be added."""
    k_ready, k_free, v_ready, v_free = kv_bars
    for tile in range(begin, end):
        mbarrier.wait(turns.index(HALF), ((step + tile) & 1) ^ (1 - HALF))
        scores = _scores(q, k_smem, count, scores_layout)
        _await(v_ready, count - 1)
        acc = warpgroup_mma(weights, _values(v_smem, count - 1, HALF), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - HALF))
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(count % STAGES))
        first = first_key + tile * k_smem.type.shape[1]
        scores, highest, total, shrink = _softmax(
            scores, highest, total, first, positions, window, scale_log2, MASKED, WINDOWED
        )
        # It stands here because its branch keeps the assembler from moving the softmax behind the wait for
        # the values.
        _await(k_ready, count + 1, tile + 1 < tiles)
        acc, scores = warpgroup_mma_wait(0, deps=[acc, scores])
        mbarrier.arrive(v_free.index((count - 1) % STAGES))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = _as_operand(scores, k_smem.dtype, weights_layout)
        count += 1
    return acc, weights, highest, total, count


@gluon.constexpr_function
def _out_layout(N):
    """Runs of 16 bytes in a thread, in rows of the warp that has them in the layout of sums."""
    columns = [[0, 2**i] for i in range(5, N.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, N],
    )


@gluon.jit
def _attend(
    out_ptr,
    shared,
    sinks_ptr,
    window,
    scale_log2,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    N: gl.constexpr,
    BOX: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HALF: gl.constexpr,
):
    """The work of a warpgroup, on half of each item's rows."""
    note, q_smem, k_smem, v_smem, q_bars, kv_bars, turns = shared
    q_ready, q_free = q_bars
    k_ready, k_free, v_ready, v_free = kv_bars
    dtype: gl.constexpr = k_smem.dtype
    BLOCK_N: gl.constexpr = k_smem.type.shape[1]
    COLUMNS: gl.constexpr = v_smem.type.shape[2]
    ROW_TILE: gl.constexpr = HALF % q_smem.type.shape[0]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    out_layout: gl.constexpr = _out_layout(COLUMNS)
    q = q_smem.index(ROW_TILE)
    turn = 0
    count = 0  # key tiles so far, over all items
    step = -1  # one less than the turns taken so far; an item's first tile takes none
    mbarrier.wait(q_ready, 0)
    first_token, num_queries, first_pos, head = _read(note)
    while num_queries > 0:
        first_key = _first_key(first_pos, window, WINDOWED, BOX)
        tiles = gl.cdiv(first_pos + num_queries - first_key, BLOCK_N)
        positions = (
            first_pos + (ROW_TILE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))) // HEADS
        )

        _await(k_ready, count)
        scores = warpgroup_mma_wait(0, deps=[_scores(q, k_smem, count, scores_layout)])
        mbarrier.arrive(k_free.index(count % STAGES))
        total = gl.full([ROWS], 1.0 if HAS_SINKS else 0.0, gl.float32, gl.SliceLayout(1, scores_layout))
        if HAS_SINKS:  # It is a key without a value.
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
            highest = gl.load(sinks_ptr + head + rows % HEADS) * LOG2_E
        else:
            highest = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, scores_layout))
        scores, highest, total, _ = _softmax(
            scores, highest, total, first_key, positions, window, scale_log2, True, WINDOWED
        )
        weights = _as_operand(scores, dtype, weights_layout)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
        count += 1
        _await(k_ready, count, tiles > 1)
        masked = 1
        if not WINDOWED:
            masked = gl.maximum((first_pos + 1) // BLOCK_N, 1)  # All rows see all keys of the tiles before.
            acc, weights, highest, total, count = _tiles(
                acc,
                weights,
                highest,
                total,
                1,
                masked,
                tiles,
                first_key,
                count,
                step,
                q,
                k_smem,
                v_smem,
                kv_bars,
                turns,
                positions,
                window,
                scale_log2,
                False,
                WINDOWED,
                HALF,
                scores_layout,
                weights_layout,
            )
        acc, weights, highest, total, count = _tiles(
            acc,
            weights,
            highest,
            total,
            masked,
            tiles,
            tiles,
            first_key,
            count,
            step,
            q,
            k_smem,
            v_smem,
            kv_bars,
            turns,
            positions,
            window,
            scale_log2,
            True,
            WINDOWED,
            HALF,
            scores_layout,
            weights_layout,
        )
        step += tiles - 1
        mbarrier.arrive(q_free)
        _await(v_ready, count - 1)
        acc = warpgroup_mma(weights, _values(v_smem, count - 1, HALF), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index((count - 1) % STAGES))

        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc_layout))[:, None]
        result = gl.convert_layout(acc.to(dtype), out_layout)
        rows = ROW_TILE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
        offsets = rows // HEADS * (H * N) + rows % HEADS * N
        tile_ptr = out_ptr + first_token.to(gl.int64) * (H * N) + head * N + (HALF * COLUMNS) % N
        gl.store(
            tile_ptr + offsets[:, None] + gl.arange(0, COLUMNS, gl.SliceLayout(0, out_layout))[None, :],
            result,
            mask=(rows // HEADS < num_queries)[:, None],
        )
        turn += 1
        mbarrier.wait(q_ready, turn & 1)
        first_token, num_queries, first_pos, head = _read(note)


@gluon.jit(
    do_not_specialize=["window", "num_tiles", "num_items", "num_lines"],
    do_not_specialize_on_alignment=["work_ptr", "taken_ptr", "rows_ptr", "table_ptr", "sinks_ptr"],
)
def hopper_prefill_kernel(
    q_desc,
    kv_desc,
    kv_ptr,
    out_ptr,
    work_ptr,
    taken_ptr,
    rows_ptr,
    table_ptr,
    sinks_ptr,
    window,
    scale_log2,
    num_tiles,
    num_items,
    stride_table,
    block_lines,
    kv_lines,
    head_lines,
    num_lines,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROW_TILES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WINDOWED: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """Items are pairs (HEADS heads, tile of ROW_TILES * ROWS / HEADS queries), with the heads in the outer
    order. So programs that run side by side read the same keys, from the L2 cache."""
    dtype: gl.constexpr = kv_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [ROW_TILES, ROWS, N], kv_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, N], kv_desc.layout)
    PARTS: gl.constexpr = 2 // ROW_TILES
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, N // PARTS], kv_desc.layout)
    note = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    q_bars, kv_bars = (q_ready, q_free), (k_ready, k_free, v_ready, v_free)
    shared = note, q_smem, k_smem, v_smem, q_bars, kv_bars, turns
    gl.warp_specialize(
        [
            (
                _attend,
                (out_ptr, shared, sinks_ptr, window, scale_log2, H, HEADS, N, BOX, WINDOWED, HAS_SINKS, 0),
            ),
            (
                _attend,
                (out_ptr, shared, sinks_ptr, window, scale_log2, H, HEADS, N, BOX, WINDOWED, HAS_SINKS, 1),
            ),
            (
                _fetch,
                (
                    q_desc,
                    kv_desc,
                    kv_ptr,
                    work_ptr,
                    taken_ptr,
                    rows_ptr,
                    table_ptr,
                    shared,
                    num_tiles,
                    num_items,
                    stride_table,
                    block_lines,
                    kv_lines,
                    head_lines,
                    num_lines,
                    window,
                    GROUP,
                    HEADS,
                    N,
                    BLOCK_SIZE,
                    BOX,
                    WINDOWED,
                ),
            ),
        ],
        [4, 1],
        [224, 56],
    )  # warps, and registers a thread, of all but the first


class ItemTiles(NamedTuple):
    """Tile sizes by head size. Two warpgroups that share one tile of rows both compute its scores, and have
    half of the values' columns each."""

    row_tiles: int  # each has 64 rows
    keys: int


def item_tiles(head_dim: int) -> ItemTiles:
    """Returns the largest tiles for which there are registers, and shared memory for the rows and two tiles
    each of keys and values."""
    return ItemTiles(2, 128) if head_dim <= 128 else ItemTiles(2, 64) if head_dim <= 256 else ItemTiles(1, 32)


def heads_an_item(group: int) -> int:
    """Returns the number of query heads of one kv head that share an item: the largest power of two that
    divides the group."""
    return min(group & -group, 16)


def prefill_work(
    query_starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
    first_seq: int,
    group: int,
    head_dim: int,
    select: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """The tiles of the sequences from `first_seq` on, int32 [tiles, 4]: first token, number of queries,
    position of the first, sequence. `group`: the number of query heads for each kv head.

    The tiles with tokens of `select` (ascending; None: all tokens) come first, then the others; among both,
    those with most keys are first. Returned too: how many tiles have selected tokens."""
    starts = np.array(query_starts[first_seq:])
    lens, tile = np.diff(starts), item_tiles(head_dim).row_tiles * ROWS.value // heads_an_item(group)
    counts = -(-lens // tile)
    seqs = np.repeat(np.arange(len(lens)), counts)
    firsts = (np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    queries = np.minimum(lens[seqs] - firsts, tile)
    positions = (np.array(kv_lens[first_seq:]) - lens)[seqs] + firsts
    tokens = starts[seqs] + firsts
    rest = (
        np.zeros(len(seqs), bool)
        if select is None
        else np.searchsorted(select, tokens) == np.searchsorted(select, tokens + queries)
    )
    work = np.stack([tokens, queries, positions, first_seq + seqs], axis=1).astype(np.int32)
    return work[np.lexsort((-(positions + queries), rest))], int((~rest).sum())


def hopper_prefill_attention(
    q_THN: torch.Tensor,
    kv_layer: torch.Tensor,
    out_THN: torch.Tensor,
    work: torch.Tensor,
    taken: torch.Tensor,
    rows_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    scale: float,
    num_sms: int,
    sinks_H: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Writes out_THN of the queries in `work`, which `prefill_work` made and which is on the device. All
    their keys and values are in the cache. `window`: how many positions a query sees, with its own.

    `taken`: int32 [1]. Every launch leaves 0 there, which the next one counts on. So launches that share it
    must run one after the other."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    num_heads = q_THN.shape[1]
    heads, box, tiles = heads_an_item(num_heads // num_kv_heads), min(block_size, BOX), item_tiles(head_dim)
    assert (
        q_THN.stride()[1:] == (head_dim, 1)
        and out_THN.is_contiguous()
        and kv_layer.stride()[3:] == (head_dim, 1)
    )
    assert work.is_contiguous() and block_tables_RM.stride(1) == 1 and takes_blocks(kv_layer)
    block_lines, kv_lines, head_lines = (stride // head_dim for stride in kv_layer.stride()[:3])
    num_lines = (num_blocks - 1) * block_lines + 2 * kv_lines
    q_desc = TensorDescriptor(
        q_THN,
        list(q_THN.shape),
        list(q_THN.stride()),
        [ROWS.value // heads, heads, PANEL.value],
        QUERY_LAYOUT,
    )
    kv_desc = TensorDescriptor(
        kv_layer, [num_lines, head_dim], [head_dim, 1], [box, PANEL.value], TILE_LAYOUT
    )
    num_items = work.shape[0] * (num_heads // heads)
    hopper_prefill_kernel[(min(num_sms, num_items),)](
        q_desc,
        kv_desc,
        kv_layer,
        out_THN,
        work,
        taken,
        rows_S,
        block_tables_RM,
        sinks_H,
        window or 0,
        scale * LOG2_E.value,
        work.shape[0],
        num_items,
        block_tables_RM.stride(0),
        block_lines,
        kv_lines,
        head_lines,
        num_lines,
        H=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=heads,
        N=head_dim,
        BLOCK_SIZE=block_size,
        BOX=box,
        ROW_TILES=tiles.row_tiles,
        BLOCK_N=tiles.keys,
        WINDOWED=window is not None,
        HAS_SINKS=has_sinks(sinks_H),
        num_warps=4,
        maxnreg=168,
    )
