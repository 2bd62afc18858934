"""Absorbed attention of decodes on Hopper, in Gluon (Triton's language of warps and layouts). As in
attention.py keys, and the numbers of values, are the rows of the matmuls, here of the tensor cores' wide
ones.

A program stays on its SM. Four warps copy latents, 16 bytes a thread. Two warpgroups multiply; both compute
all weights, and each sums one half of the latents' numbers, so that one's softmax meets the other's matmuls.
Work is a list of pieces: KEYS keys for a tile of rows. Programs get runs of it that are equally long,
whatever the lengths of the sequences are. What belongs to several programs is joined by the one that is done
last.

Figures are in benchmarks/results/kernels.md. The oracle and the dimensions are in reference.py; a row is a
query of one head, as in attention.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shoal.kernels.attention.paged_attention import LOG2_E
from shoal.kernels.hopper import barrier
from shoal.kernels.latent.attention import MAX_TILE_ROWS, LatentParts, LatentWorkspace
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.matmul.hopper_linear import start_next, wait_for_inputs, wait_for_previous
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.latent import LatentKind

KEYS: gl.constexpr = gl.constexpr(64)
LEAST: gl.constexpr = gl.constexpr(2)  # pieces of a program
SEQS: gl.constexpr = gl.constexpr(256)  # sequences whose lengths are looked at together
LOWEST: gl.constexpr = gl.constexpr(-1e30)  # scores before the first key


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _num_tiles(kv_len):
    """Tiles of a sequence's keys. An empty place has one, which gives zeros."""
    return gl.maximum((kv_len + KEYS - 1) // KEYS, 1)


@gluon.jit
def _share(kv_lens_ptr, num_seqs, ROW_TILES: gl.constexpr):
    """Returns the program's first piece, the end of its pieces, how many a program has, and of the first its
    sequence and place there."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    seqs = gl.arange(0, SEQS, layout)
    total = 0
    for chunk in range(0, num_seqs, SEQS):
        there = chunk + seqs < num_seqs
        lens = gl.load(kv_lens_ptr + chunk + seqs, mask=there, other=0, cache_modifier=".cg")
        total += gl.sum(gl.where(there, _num_tiles(lens) * ROW_TILES, 0), 0)
    most = gl.maximum(gl.cdiv(total, gl.num_programs(0)), LEAST)
    begin = gl.minimum(gl.program_id(0) * most, total)
    seq, first, before = 0, 0, 0
    for chunk in range(0, num_seqs, SEQS):
        there = chunk + seqs < num_seqs
        lens = gl.load(kv_lens_ptr + chunk + seqs, mask=there, other=0, cache_modifier=".cg")
        pieces = gl.where(there, _num_tiles(lens) * ROW_TILES, 0)
        is_earlier = there & (before + gl.associative_scan(pieces, 0, _add) <= begin)
        seq += gl.sum(gl.where(is_earlier, 1, 0), 0)
        first += gl.sum(gl.where(is_earlier, pieces, 0), 0)
        before += gl.sum(pieces, 0)
    return begin, gl.minimum(begin + most, total), most, seq, begin - first


@gluon.jit
def _split(kv_lens_ptr, splits, min_split, ROW_TILES: gl.constexpr):
    """The same for a program of a grid of (tiles of rows, splits), which has the keys that attention.py's
    `split_keys` says."""
    seq = gl.program_id(0) // ROW_TILES
    kv_len = gl.load(kv_lens_ptr + seq, cache_modifier=".cg")
    tiles = _num_tiles(kv_len)
    most = gl.cdiv(gl.maximum(gl.cdiv(kv_len, splits), min_split), KEYS)
    begin = gl.minimum(gl.program_id(1) * most, tiles)
    end = gl.minimum(begin + most, tiles)
    first = gl.program_id(0) % ROW_TILES * tiles
    return first + begin, first + end, most, seq, first + begin


@gluon.jit
def _fetch_queries(
    q_ptr,
    q_ring,
    seq,
    first_row,
    turn,
    R: gl.constexpr,
    C: gl.constexpr,
    ROTARY: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copies a tile of a sequence's rows of queries. Rows that are not there become zeros."""
    q_c, q_r, q_full, q_free = q_ring
    N: gl.constexpr = C + ROTARY
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, C // 2, gl.SliceLayout(0, copied))[None, :]
    rotary = C + gl.arange(0, ROTARY, gl.SliceLayout(0, copied))[None, :]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    slot = turn % STAGES
    mbarrier.wait(q_free.index(slot), (turn // STAGES & 1) ^ 1)
    is_row = (first_row + row < R)[:, None]
    q_ptrs = q_ptr + (seq.to(gl.int64) * R + first_row + row)[:, None] * N
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            q_c.index(2 * slot + half), q_ptrs + half * (C // 2) + column, mask=is_row
        )
    async_copy.async_copy_global_to_shared(q_r.index(slot), q_ptrs + rotary, mask=is_row)
    async_copy.mbarrier_arrive(q_full.index(slot), increment_count=False)


@gluon.jit
def _fetch(
    q_ptr,
    cache_ptr,
    kv_lens_ptr,
    rows_ptr,
    table_ptr,
    stride_table,
    stride_block,
    num_seqs,
    share,
    q_ring,
    key_ring,
    R: gl.constexpr,
    C: gl.constexpr,
    ROTARY: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    NEW: gl.constexpr,
    PDL: gl.constexpr,
):
    """The work of the producer warps. Keys that are not there become zeros. NEW > 0: it has not waited yet
    for the kernels before. It copies keys first, up to STAGES tiles without the NEW newest ones, which are
    the step's."""
    c_smem, r_smem, full, free = key_ring
    at_piece, end_piece, _most, seq, within = share
    N: gl.constexpr = C + ROTARY
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, C // 2, gl.SliceLayout(0, copied))[None, :]
    rotary = C + gl.arange(0, ROTARY, gl.SliceLayout(0, copied))[None, :]
    key = gl.arange(0, KEYS, gl.SliceLayout(1, copied))
    turn, count = 0, 0
    last = num_seqs - 1
    kv_len = gl.load(kv_lens_ptr + gl.minimum(seq, last), cache_modifier=".cg")
    table_row = gl.load(rows_ptr + gl.minimum(seq, last), cache_modifier=".cg")
    while at_piece < end_piece:
        # The next sequence's are on their way while this one's keys are copied.
        next_len = gl.load(kv_lens_ptr + gl.minimum(seq + 1, last), cache_modifier=".cg")
        next_row = gl.load(rows_ptr + gl.minimum(seq + 1, last), cache_modifier=".cg")
        tiles = _num_tiles(kv_len)
        row_tile, begin = within // tiles, within % tiles
        stop = gl.minimum(tiles, begin + end_piece - at_piece)
        blocks_ptr = table_ptr + table_row.to(gl.int64) * stride_table

        early = begin
        if NEW > 0:
            early = gl.maximum(begin, gl.minimum(gl.minimum(begin + STAGES, stop), (kv_len - NEW) // KEYS))
        for tile in range(begin, stop + 1):
            if tile == early:
                if NEW > 0:
                    wait_for_previous(PDL)
                _fetch_queries(q_ptr, q_ring, seq, row_tile * BLOCK_M, turn, R, C, ROTARY, BLOCK_M, STAGES)
            if tile < stop:
                stage = count % STAGES
                keys = tile * KEYS + key
                there = keys < kv_len
                blocks = gl.load(blocks_ptr + keys // BLOCK_SIZE, mask=there, other=0, cache_modifier=".cg")
                lines = blocks.to(gl.int64) * stride_block + keys % BLOCK_SIZE * N
                key_ptrs, there = cache_ptr + lines[:, None], there[:, None]
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                for half in gl.static_range(2):
                    async_copy.async_copy_global_to_shared(
                        c_smem.index(2 * stage + half), key_ptrs + half * (C // 2) + column, mask=there
                    )
                async_copy.async_copy_global_to_shared(r_smem.index(stage), key_ptrs + rotary, mask=there)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                count += 1
        turn += 1
        at_piece += stop - begin
        within += stop - begin
        if within == tiles * ((R + BLOCK_M - 1) // BLOCK_M):
            seq += 1
            within = 0
            kv_len, table_row = next_len, next_row


@gluon.jit
def _store_part(result, highest, total, partial_ptr, lse_ptr, place):
    """Stores a partial result, and its log2-sum-exp, of half of the numbers."""
    WIDE: gl.constexpr = result.shape[0]
    BLOCK_M: gl.constexpr = result.shape[1]
    dim = gl.arange(0, WIDE, gl.SliceLayout(1, result.type.layout))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, result.type.layout))
    numbers = partial_ptr + place.to(gl.int64) * (WIDE * BLOCK_M)
    gl.store(numbers + dim[:, None] * BLOCK_M + row[None, :], result)
    gl.store(lse_ptr + place * BLOCK_M + row, highest + gl.log2(total))


@gluon.jit
def _place(program, starts, HALF: gl.constexpr):
    """Returns the place of a program's part. It has at most one that starts a tile of rows, and one more."""
    return (2 * program + gl.where(starts, 1, 0)) * 2 + HALF


@gluon.jit
def _joined(
    partial_ptr,
    lse_ptr,
    first,
    parts,
    layout: gl.constexpr,
    WIDE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HALF: gl.constexpr,
):
    """Returns the weighted sum of the parts that programs from `first` on have stored."""
    dim = gl.arange(0, WIDE, gl.SliceLayout(1, layout))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    acc = gl.zeros([WIDE, BLOCK_M], gl.float32, layout)
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(0, layout))
    highest = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(0, layout))
    for part in range(parts):
        place = _place(first + part, part == 0, HALF)
        lse = gl.load(lse_ptr + place * BLOCK_M + row, cache_modifier=".cg")
        numbers = partial_ptr + place.to(gl.int64) * (WIDE * BLOCK_M)
        partial = gl.load(numbers + dim[:, None] * BLOCK_M + row[None, :], cache_modifier=".cg")
        new_highest = gl.maximum(highest, lse)
        shrink = gl.exp2(highest - new_highest)
        weight = gl.exp2(lse - new_highest)
        acc = acc * shrink[None, :] + partial * weight[None, :]
        total = total * shrink + weight
        highest = new_highest
    return acc / total[None, :]


@gluon.jit
def _attend(
    out_ptr,
    kv_lens_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    scale_log2,
    num_seqs,
    share,
    q_ring,
    key_ring,
    weights_smem,
    H: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    LEAVES: gl.constexpr,
    HALF: gl.constexpr,
):
    """The work of a warpgroup, on half of the numbers of each sum."""
    q_c, q_r, q_full, q_free = q_ring
    c_smem, r_smem, full, free = key_ring
    at_piece, end_piece, most, seq, within = share
    WIDE: gl.constexpr = C // 2
    dtype: gl.constexpr = c_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    key = gl.arange(0, KEYS, gl.SliceLayout(1, mma))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
    dim = HALF * WIDE + gl.arange(0, WIDE, gl.SliceLayout(1, mma))
    nothing = gl.zeros([KEYS, BLOCK_M], gl.float32, mma)
    own_weights = weights_smem.index(HALF)
    turn, count = 0, 0
    last = num_seqs - 1
    kv_len = gl.load(kv_lens_ptr + gl.minimum(seq, last), cache_modifier=".cg")
    while at_piece < end_piece:
        next_len = gl.load(kv_lens_ptr + gl.minimum(seq + 1, last), cache_modifier=".cg")
        tiles = _num_tiles(kv_len)
        row_tile, begin = within // tiles, within % tiles
        stop = gl.minimum(tiles, begin + end_piece - at_piece)
        first_row = row_tile * BLOCK_M
        positions = kv_len - R // H + (first_row + row) // H
        slot = turn % STAGES
        mbarrier.wait(q_full.index(slot), turn // STAGES & 1)
        acc = gl.zeros([WIDE, BLOCK_M], gl.float32, mma)
        sums = gl.zeros([KEYS, BLOCK_M], gl.float32, mma)  # Weights are added up at the end.
        highest = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(0, mma))
        for tile in range(begin, stop):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            fence_async_shared()  # Tensor cores see what threads copied.
            scores = warpgroup_mma(
                r_smem.index(stage), q_r.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            for half in gl.static_range(2):
                keys, queries = c_smem.index(2 * stage + half), q_c.index(2 * slot + half)
                scores = warpgroup_mma(keys, queries.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            visible = (tile * KEYS + key)[:, None] <= positions[None, :]
            scores = gl.where(visible, scores * scale_log2, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(scores, 0))
            weights = gl.exp2(scores - new_highest[None, :])
            shrink = gl.exp2(highest - new_highest)
            highest = new_highest
            own_weights.store(weights.to(dtype))
            fence_async_shared()
            sums = sums * shrink[None, :] + weights
            acc = acc * shrink[None, :]
            values = c_smem.index(2 * stage + HALF).permute((1, 0))
            acc = warpgroup_mma(values, own_weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage))
            count += 1
        mbarrier.arrive(q_free.index(slot))
        turn += 1
        total = gl.sum(sums, 0)
        total = gl.where(total > 0, total, 1.0)  # a row that sees no key gives 0, with a tiny weight
        result = acc / total[None, :]
        at = seq.to(gl.int64) * R + first_row + row
        is_row = first_row + row < R
        if LEAVES:
            at += gl.program_id(1).to(gl.int64) * (num_seqs * R)
            gl.store(partial_ptr + at[None, :] * C + dim[:, None], result, mask=is_row[None, :])
            if HALF == 0:
                gl.store(lse_ptr + at, highest + gl.log2(total), mask=is_row)
        else:
            ends = stop - begin == tiles
            if stop - begin < tiles:  # Other programs have the other keys.
                first = (at_piece - begin) // most
                parts = (at_piece - begin + tiles - 1) // most - first + 1
                place = _place(gl.program_id(0), begin == 0, HALF)
                _store_part(result, highest, total, partial_ptr, lse_ptr, place)
                barrier()
                # All have stored before this one says so (release), and what they stored is seen (acquire).
                arrived = gl.atomic_add(arrived_ptr + 2 * first + HALF, 1, sem="acq_rel", scope="gpu")
                barrier()
                ends = arrived == parts - 1
                if ends:
                    gl.store(arrived_ptr + 2 * first + HALF, 0)
                    result = _joined(partial_ptr, lse_ptr, first, parts, mma, WIDE, BLOCK_M, HALF)
            if ends:
                gl.store(out_ptr + at[None, :] * C + dim[:, None], result.to(dtype), mask=is_row[None, :])
        at_piece += stop - begin
        within += stop - begin
        if within == tiles * ((R + BLOCK_M - 1) // BLOCK_M):
            seq += 1
            within = 0
            kv_len = next_len


@gluon.jit(
    do_not_specialize=["num_seqs", "splits", "min_split"],
    do_not_specialize_on_alignment=["kv_lens_ptr", "rows_ptr"],
)
def hopper_latent_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    kv_lens_ptr,
    rows_ptr,
    table_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    scale_log2,
    stride_table,
    stride_block,
    num_seqs,
    splits,
    min_split,
    H: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    ROTARY: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    LEAVES: gl.constexpr,
    PDL: gl.constexpr,
):
    """R: rows of a sequence, in tiles of BLOCK_M. STAGES: tiles of keys, and of queries, in shared memory. A
    row of a query before position 0, and of an empty place, gets zeros. LEAVES: the grid is (tiles of rows,
    splits), and partial results are left as they are, as by attention.py."""
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_M, 16, 2)
    q_c = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, C // 2], swizzled)
    q_r = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, ROTARY], swizzled)
    c_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, C // 2], swizzled)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, ROTARY], swizzled)
    weights_smem = gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_M], narrow)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=128)  # threads that copy
        mbarrier.init(q_free.index(i), count=2)
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(free.index(i), count=2)
    ROW_TILES: gl.constexpr = (R + BLOCK_M - 1) // BLOCK_M
    if LEAVES:
        share = _split(kv_lens_ptr, splits, min_split, ROW_TILES)
    else:
        share = _share(kv_lens_ptr, num_seqs, ROW_TILES)
    q_ring, key_ring = (q_c, q_r, q_full, q_free), (c_smem, r_smem, full, free)
    if LEAVES:
        start_next(PDL)  # The warps that copy wait, and the others for them.
    else:
        wait_for_inputs(PDL)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out_ptr,
                    kv_lens_ptr,
                    partial_ptr,
                    lse_ptr,
                    arrived_ptr,
                    scale_log2,
                    num_seqs,
                    share,
                    q_ring,
                    key_ring,
                    weights_smem,
                    H,
                    R,
                    C,
                    BLOCK_M,
                    STAGES,
                    LEAVES,
                    0,
                ),
            ),
            (
                _attend,
                (
                    out_ptr,
                    kv_lens_ptr,
                    partial_ptr,
                    lse_ptr,
                    arrived_ptr,
                    scale_log2,
                    num_seqs,
                    share,
                    q_ring,
                    key_ring,
                    weights_smem,
                    H,
                    R,
                    C,
                    BLOCK_M,
                    STAGES,
                    LEAVES,
                    1,
                ),
            ),
            (
                _fetch,
                (
                    q_ptr,
                    cache_ptr,
                    kv_lens_ptr,
                    rows_ptr,
                    table_ptr,
                    stride_table,
                    stride_block,
                    num_seqs,
                    share,
                    q_ring,
                    key_ring,
                    R,
                    C,
                    ROTARY,
                    BLOCK_SIZE,
                    BLOCK_M,
                    STAGES,
                    R // H if LEAVES else 0,
                    PDL,
                ),
            ),
        ],
        [4, 4],
        [208, 80],
    )  # warps, and registers a thread, of all but the first


def takes_latents(kind: LatentKind, dtype: torch.dtype) -> bool:
    """Says if a sum has room in registers, and keys consist of whole rows of 128 bytes."""
    size = kind.kv_lora_rank
    return dtype in (torch.bfloat16, torch.float16) and size in (128, 256, 512) and kind.rotary_dim == 64


def hopper_latent_attention(
    q_THN: torch.Tensor,
    cache: LayerCache,
    out_THC: torch.Tensor | None,
    kv_lens_S: torch.Tensor,
    rows_S: torch.Tensor,
    block_tables_RM: torch.Tensor,
    workspace: LatentWorkspace,
    scale: float,
    *,
    num_seqs: int,
    queries: int,
    num_sms: int,
    splits: int = 1,
    min_split: int = 1,
) -> LatentParts | None:
    """Writes out_THC, the weighted sums of latents, of the first `num_seqs` sequences, which have `queries`
    tokens each, one sequence after the other. Without out_THC leaves their parts, `splits` of a sequence at
    most."""
    num_heads, width = q_THN.shape[1:]
    rows, size, block_size = queries * num_heads, workspace.size, cache.blocks.shape[3]
    block_m = max(16, min(next_power_of_2(rows), MAX_TILE_ROWS))
    assert q_THN.is_contiguous() and block_tables_RM.stride(1) == 1
    assert cache.blocks.stride()[3:] == (width, 1) and cache.blocks.stride(0) % 8 == 0
    assert q_THN.dtype == cache.blocks.dtype
    leaves = out_THC is None
    if out_THC is None:
        assert splits * num_seqs * rows <= workspace.lse.numel()
        assert splits * num_seqs * rows * size <= workspace.partial.numel()
    else:
        assert out_THC.is_contiguous() and out_THC.dtype == q_THN.dtype
        assert 4 * num_sms * block_m <= workspace.lse.numel() and 2 * num_sms <= workspace.arrived.numel()
    hopper_latent_kernel[(num_seqs * cdiv(rows, block_m), splits) if leaves else (num_sms,)](
        q_THN,
        cache.blocks,
        q_THN if leaves else out_THC,
        kv_lens_S,
        rows_S,
        block_tables_RM,
        workspace.partial,
        workspace.lse,
        workspace.arrived,
        scale * LOG2_E,
        block_tables_RM.stride(0),
        cache.blocks.stride(0),
        num_seqs,
        splits,
        min_split,
        H=num_heads,
        R=rows,
        C=size,
        ROTARY=width - size,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        STAGES=2,
        LEAVES=leaves,
        num_warps=4,
        maxnreg=168,
        **pdl_options(),
    )
    if not leaves:
        return None
    return LatentParts(workspace.partial, workspace.lse, kv_lens_S, splits, min_split, KEYS.value, queries)
