"""Absorbed attention of decodes on Hopper, in Gluon (Triton's language of warps and layouts). As in
attention.py keys, and the numbers of values, are the rows of the matmuls, here of the tensor cores' wide
ones.

A program stays on its SM. Four warps copy latents, 16 bytes a thread. Two warpgroups multiply, each one half
of the latents' numbers, and meet twice in a tile of keys: they add their scores in shared memory, and each
computes the weights of half of the rows for both.

Work is a list of pieces: KEYS keys for a tile of rows. Programs get runs of it that are equally long,
whatever the lengths of the sequences are. Parts of a sequence are joined by the program that has its first
keys. That is the end of this program's run; the other programs leave their parts at the begin of theirs.

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
from shoal.kernels.rounding import cdiv
from shoal.kinds.latent import LatentKind

KEYS: gl.constexpr = gl.constexpr(64)
LEAST: gl.constexpr = gl.constexpr(2)  # pieces of a program
SEQS: gl.constexpr = gl.constexpr(256)  # sequences whose lengths are looked at together
MOST_POLLS: gl.constexpr = gl.constexpr(1 << 24)  # some 10 s, where others' parts take a few us
LOWEST: gl.constexpr = gl.constexpr(-1e30)  # scores before the first key


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _num_tiles(kv_len):
    """Tiles of a sequence's keys. An empty place has one, which gives zeros."""
    return gl.maximum((kv_len + KEYS - 1) // KEYS, 1)


@gluon.jit
def _run():
    """Returns the number of the program's run. The first program has the last one, so that a program waits
    for programs before it alone, which a GPU starts no later."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def _share(kv_lens_ptr, num_seqs, ROW_TILES: gl.constexpr):
    """Returns the first piece of a program's run, the end of the run, how many a run has, and of the first
    its sequence and place there."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    seqs = gl.arange(0, SEQS, layout)
    total = 0
    for chunk in range(0, num_seqs, SEQS):
        there = chunk + seqs < num_seqs
        lens = gl.load(kv_lens_ptr + chunk + seqs, mask=there, other=0, cache_modifier=".cg")
        total += gl.sum(gl.where(there, _num_tiles(lens) * ROW_TILES, 0), 0)
    most = gl.maximum(gl.cdiv(total, gl.num_programs(0)), LEAST)
    begin = gl.minimum(_run() * most, total)
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
    mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
    is_row = (first_row + row < R)[:, None]
    q_ptrs = q_ptr + (seq.to(gl.int64) * R + first_row + row)[:, None] * N
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            q_c.index(half), q_ptrs + half * (C // 2) + column, mask=is_row
        )
    async_copy.async_copy_global_to_shared(q_r.index(0), q_ptrs + rotary, mask=is_row)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)


@gluon.jit
def _lines(cache_ptr, blocks_ptr, keys, kv_len, stride_block, N: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Returns where the latents of keys are, and if they are there, [keys, 1]."""
    there = keys < kv_len
    blocks = gl.load(blocks_ptr + keys // BLOCK_SIZE, mask=there, other=0, cache_modifier=".cg")
    lines = blocks.to(gl.int64) * stride_block + keys % BLOCK_SIZE * N
    return cache_ptr + lines[:, None], there[:, None]


@gluon.jit
def _half(smem, part: gl.constexpr):
    """A tile's first or second half, along its first dimension."""
    LENGTH: gl.constexpr = smem.shape[0] // 2
    return smem.slice(part * LENGTH, LENGTH, 0)


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
    """The work of the producer warps. Keys that are not there become zeros. A tile's first
    half makes place for new keys while the second one is multiplied. NEW > 0: it has not waited yet
    for the kernels before. It copies keys first, up to STAGES tiles without the NEW newest ones, which are
    the step's."""
    c_smem, r_smem, full, free = key_ring
    at_piece, end_piece, _most, seq, within = share
    N: gl.constexpr = C + ROTARY
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, C // 2, gl.SliceLayout(0, copied))[None, :]
    rotary = C + gl.arange(0, ROTARY, gl.SliceLayout(0, copied))[None, :]
    key = gl.arange(0, KEYS // 2, gl.SliceLayout(1, copied))
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

        early = gl.minimum(begin + 1, stop)  # Queries have one place, which is free later than keys'.
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
                low, is_low = _lines(cache_ptr, blocks_ptr, keys, kv_len, stride_block, N, BLOCK_SIZE)
                keys += KEYS // 2
                high, is_high = _lines(cache_ptr, blocks_ptr, keys, kv_len, stride_block, N, BLOCK_SIZE)
                for part in gl.static_range(2):
                    mbarrier.wait(free.index(2 * stage + part), (count // STAGES & 1) ^ 1)
                    key_ptrs, there = (high, is_high) if part else (low, is_low)
                    for half in gl.static_range(2):
                        async_copy.async_copy_global_to_shared(
                            _half(c_smem.index(2 * stage + half), part),
                            key_ptrs + half * (C // 2) + column,
                            mask=there,
                        )
                    async_copy.async_copy_global_to_shared(
                        _half(r_smem.index(stage), part), key_ptrs + rotary, mask=there
                    )
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
def _leave_part(result, lse, partial_ptr, lse_ptr, counter, HALF: gl.constexpr):
    """Stores a run's partial result and log2-sum-exp, of half of the numbers, and counts it. A run leaves
    one at most."""
    WIDE: gl.constexpr = result.shape[0]
    BLOCK_M: gl.constexpr = result.shape[1]
    dim = gl.arange(0, WIDE, gl.SliceLayout(1, result.type.layout))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, result.type.layout))
    place = 2 * _run() + HALF
    numbers = partial_ptr + place.to(gl.int64) * (WIDE * BLOCK_M)
    gl.store(numbers + dim[:, None] * BLOCK_M + row[None, :], result)
    gl.store(lse_ptr + place * BLOCK_M + row, lse)
    barrier()  # All have stored before one of them says so.
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def _await_parts(counter, parts):
    """Waits for as many parts. The programs that leave them began before this one, and wait for none."""
    arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    polls = 0
    while (arrived < parts) & (polls < MOST_POLLS):
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        polls += 1
    if arrived < parts:  # An error is better than a GPU that hangs.
        gl.inline_asm_elementwise("trap; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
    gl.store(counter, 0)


@gluon.jit
def _copy_part(smem, partial_ptr, run, is_there, HALF: gl.constexpr):
    """Copies a run's part into shared memory, if it is there."""
    WIDE: gl.constexpr = smem.shape[0]
    BLOCK_M: gl.constexpr = smem.shape[1]
    copied: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    dim = gl.arange(0, WIDE, gl.SliceLayout(1, copied))[:, None]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, copied))[None, :]
    numbers = partial_ptr + (2 * run + HALF).to(gl.int64) * (WIDE * BLOCK_M)
    mask = (row < BLOCK_M) & is_there
    async_copy.async_copy_global_to_shared(smem, numbers + dim * BLOCK_M + row, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _join(acc, highest, total, partial_ptr, lse_ptr, first, parts, c_smem, HALF: gl.constexpr):
    """Adds the parts that `parts` runs from `first` on have left to sums. Two are on their way at once, to
    where keys were."""
    WIDE: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    landing: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout))
    for i in gl.static_range(2):
        smem = c_smem.index(2 * i + HALF)._reinterpret(gl.float32, [WIDE, BLOCK_M], landing)
        _copy_part(smem, partial_ptr, first + i, i < parts, HALF)
    next_lse = gl.load(lse_ptr + (2 * first + HALF) * BLOCK_M + row, cache_modifier=".cg")
    for i in range(parts):
        lse = next_lse
        following = first + gl.minimum(i + 1, parts - 1)
        next_lse = gl.load(lse_ptr + (2 * following + HALF) * BLOCK_M + row, cache_modifier=".cg")
        new_highest = gl.maximum(highest, lse)
        shrink = gl.exp2(highest - new_highest)
        weight = gl.exp2(lse - new_highest)
        total = total * shrink + weight
        highest = new_highest
        smem = c_smem.index(2 * (i % 2) + HALF)._reinterpret(gl.float32, [WIDE, BLOCK_M], landing)
        async_copy.wait_group(1)
        barrier()
        partial = smem.load(acc.type.layout)
        acc = acc * shrink[None, :] + partial * weight[None, :]
        barrier()
        _copy_part(smem, partial_ptr, first + i + 2, i + 2 < parts, HALF)
    async_copy.wait_group(0)
    return acc, total


@gluon.jit
def _store_sums(sums, out_ptr, rows, C: gl.constexpr):
    """Stores sums, [numbers, rows], into rows of C numbers, 16 bytes a thread."""
    WIDE: gl.constexpr = sums.shape[0] // 2
    BLOCK_M: gl.constexpr = sums.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [WIDE // 8, 256 // WIDE], [1, 4], [0, 1])
    dim = gl.arange(0, WIDE, gl.SliceLayout(1, wide))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, wide))
    halves = gl.split(gl.permute(gl.reshape(sums, [2, WIDE, BLOCK_M]), (1, 2, 0)))
    for half in gl.static_range(2):
        place = out_ptr + row[None, :] * C + (half * WIDE + dim)[:, None]
        gl.store(place, gl.convert_layout(halves[half], wide), mask=(row < rows)[None, :])


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
    exchange,
    H: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    LEAVES: gl.constexpr,
    HALF: gl.constexpr,
):
    """The work of a warpgroup: half of the numbers of scores and sums, and the weights of OWN rows."""
    q_c, q_r, q_full, q_free = q_ring
    c_smem, r_smem, full, free = key_ring
    at_piece, end_piece, most, seq, within = share
    WIDE: gl.constexpr = C // 2
    dtype: gl.constexpr = c_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    weights_smem, scores_smem, stats, scored, weighed, summed = exchange
    OWN: gl.constexpr = BLOCK_M // 2  # rows whose weights this warpgroup computes
    by_rows: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 4], [1, 0])
    own_row = HALF * OWN + gl.arange(0, OWN, gl.SliceLayout(0, by_rows))
    key = gl.arange(0, KEYS, gl.SliceLayout(1, by_rows))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
    dim = HALF * WIDE + gl.arange(0, WIDE, gl.SliceLayout(1, mma))
    nothing = gl.zeros([KEYS, BLOCK_M], gl.float32, mma)
    turn, count = 0, 0
    last = num_seqs - 1
    kv_len = gl.load(kv_lens_ptr + gl.minimum(seq, last), cache_modifier=".cg")
    while at_piece < end_piece:
        next_len = gl.load(kv_lens_ptr + gl.minimum(seq + 1, last), cache_modifier=".cg")
        tiles = _num_tiles(kv_len)
        row_tile, begin = within // tiles, within % tiles
        stop = gl.minimum(tiles, begin + end_piece - at_piece)
        first_row = row_tile * BLOCK_M
        positions = kv_len - R // H + (first_row + own_row) // H
        mbarrier.wait(q_full.index(0), turn & 1)
        acc = gl.zeros([WIDE, BLOCK_M], gl.float32, mma)
        sums = gl.zeros([KEYS, OWN], gl.float32, by_rows)  # Weights are added up at the end.
        own_highest = gl.full([OWN], LOWEST, gl.float32, gl.SliceLayout(0, by_rows))
        for tile in range(begin, stop):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            fence_async_shared()  # Tensor cores see what threads copied.
            keys, queries = c_smem.index(2 * stage + HALF), q_c.index(HALF).permute((1, 0))
            scores = warpgroup_mma(keys, queries, nothing, use_acc=False, is_async=True)
            if HALF == 0:
                keys, queries = r_smem.index(stage), q_r.index(0).permute((1, 0))
                scores = warpgroup_mma(keys, queries, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores_smem.index(HALF).store(scores)
            barrier()
            mbarrier.arrive(scored.index(0))
            if tile == stop - 1:
                mbarrier.arrive(q_free.index(0))
            mbarrier.wait(scored.index(0), count & 1)
            own_scores = scores_smem.index(0).slice(HALF * OWN, OWN, 1).load(by_rows)
            own_scores += scores_smem.index(1).slice(HALF * OWN, OWN, 1).load(by_rows)
            visible = (tile * KEYS + key)[:, None] <= positions[None, :]
            own_scores = gl.where(visible, own_scores * scale_log2, float("-inf"))
            new_highest = gl.maximum(own_highest, gl.max(own_scores, 0))
            weights = gl.exp2(own_scores - new_highest[None, :])
            shrink = gl.exp2(own_highest - new_highest)
            own_highest = new_highest
            weights_smem.slice(HALF * OWN, OWN, 1).store(weights.to(dtype))
            stats.index(0).slice(HALF * OWN, OWN, 0).store(shrink)
            fence_async_shared()
            barrier()
            mbarrier.arrive(weighed.index(0))
            sums = sums * shrink[None, :] + weights
            mbarrier.wait(weighed.index(0), count & 1)
            acc = acc * stats.index(0).load(gl.SliceLayout(0, mma))[None, :]
            values = c_smem.index(2 * stage + HALF)
            for part in gl.static_range(2):
                keys = _half(values, part).permute((1, 0))
                acc = warpgroup_mma(keys, _half(weights_smem, part), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(2 * stage))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(2 * stage + 1))
            count += 1
        stats.index(1).slice(HALF * OWN, OWN, 0).store(own_highest)
        stats.index(2).slice(HALF * OWN, OWN, 0).store(gl.sum(sums, 0))
        barrier()
        mbarrier.arrive(summed.index(0))
        mbarrier.wait(summed.index(0), turn & 1)
        turn += 1
        highest = stats.index(1).load(gl.SliceLayout(0, mma))
        total = stats.index(2).load(gl.SliceLayout(0, mma))
        total = gl.where(total > 0, total, 1.0)  # a row that sees no key gives 0, with a tiny weight
        at = seq.to(gl.int64) * R + first_row + row
        is_row = first_row + row < R
        if LEAVES:
            at += gl.program_id(1).to(gl.int64) * (num_seqs * R)
            gl.store(partial_ptr + at[None, :] * C + dim[:, None], acc / total[None, :], mask=is_row[None, :])
            if HALF == 0:
                gl.store(lse_ptr + at, highest + gl.log2(total), mask=is_row)
        else:
            first = (at_piece - begin) // most  # the run that has the first keys
            counter = arrived_ptr + 2 * first + HALF
            if begin > 0:
                lse = highest + gl.log2(total)
                _leave_part(acc / total[None, :], lse, partial_ptr, lse_ptr, counter, HALF)
            else:
                if stop < tiles:
                    parts = (at_piece + tiles - 1) // most - first
                    _await_parts(counter, parts)
                    acc, total = _join(
                        acc, highest, total, partial_ptr, lse_ptr, first + 1, parts, c_smem, HALF
                    )
                result = (acc / total[None, :]).to(dtype)
                numbers = out_ptr + (seq.to(gl.int64) * R + first_row) * C + HALF * WIDE
                _store_sums(result, numbers, R - first_row, C)
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
    """R: rows of a sequence, in tiles of BLOCK_M. STAGES: tiles of keys in shared memory. A
    row of a query before position 0, and of an empty place, gets zeros. LEAVES: the grid is (tiles of rows,
    splits), and partial results are left as they are, as by attention.py."""
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Each warpgroup's rows of weights and scores are a part by themselves: as wide as what is swizzled.
    own_weights: gl.constexpr = gl.NVMMASharedLayout(BLOCK_M, 16, 2)
    own_scores: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_M, 32, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring: gl.constexpr = mbarrier.MBarrierLayout()
    q_c = gl.allocate_shared_memory(dtype, [2, BLOCK_M, C // 2], swizzled)
    q_r = gl.allocate_shared_memory(dtype, [1, BLOCK_M, ROTARY], swizzled)
    c_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, C // 2], swizzled)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, ROTARY], swizzled)
    weights_smem = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_M], own_weights)
    scores_smem = gl.allocate_shared_memory(gl.float32, [2, KEYS, BLOCK_M], own_scores)
    stats = gl.allocate_shared_memory(gl.float32, [3, BLOCK_M], flat)  # what sums shrink by, highest, total
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], ring)
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], ring)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ring)
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], ring)
    scored = gl.allocate_shared_memory(gl.int64, [1, 1], ring)
    weighed = gl.allocate_shared_memory(gl.int64, [1, 1], ring)
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], ring)
    mbarrier.init(q_full.index(0), count=128)  # threads that copy
    mbarrier.init(q_free.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(scored.index(0), count=2)
    mbarrier.init(weighed.index(0), count=2)
    mbarrier.init(summed.index(0), count=2)
    ROW_TILES: gl.constexpr = (R + BLOCK_M - 1) // BLOCK_M
    if LEAVES:
        share = _split(kv_lens_ptr, splits, min_split, ROW_TILES)
    else:
        share = _share(kv_lens_ptr, num_seqs, ROW_TILES)
    exchange = weights_smem, scores_smem, stats, scored, weighed, summed
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
                    exchange,
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
                    exchange,
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
    block_m = MAX_TILE_ROWS
    assert q_THN.is_contiguous() and block_tables_RM.stride(1) == 1
    assert cache.blocks.stride()[3:] == (width, 1) and cache.blocks.stride(0) % 8 == 0
    assert q_THN.dtype == cache.blocks.dtype
    leaves = out_THC is None
    if out_THC is None:
        assert splits * num_seqs * rows <= workspace.lse.numel()
        assert splits * num_seqs * rows * size <= workspace.partial.numel()
    else:
        assert out_THC.is_contiguous() and out_THC.dtype == q_THN.dtype
        assert 2 * num_sms * block_m <= workspace.lse.numel() and 2 * num_sms <= workspace.arrived.numel()
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
