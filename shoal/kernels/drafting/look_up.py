"""Look-ups of drafts in Triton, for a captured graph: a program for each sequence reads its own tokens.
reference.py describes what is found. Offsets count from the oldest token of the history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.drafting.draft_rows import MOST_PLACES, DraftRows, LookUp, Report, SuffixLookUp
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import next_power_of_2
from shoal.kernels.state import Field

POSITION, NUM_DRAFTS = tl.constexpr(Field.POSITION.value), tl.constexpr(Field.NUM_DRAFTS.value)
REPORT_DRAFTS = tl.constexpr(Report.NUM_DRAFTS.value)
WIDE = tl.constexpr(2048)  # places that a program compares at once
SPAN = tl.constexpr(1 << 20)  # more than any offset
PLACES = tl.constexpr(MOST_PLACES)
FEW = tl.constexpr(32)  # places that are compared with all PLACES at once
NO_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def _history(table_ptr, history_ptr, earlier_ptr, row, table_stride, LENGTH: tl.constexpr):
    """Returns the fields of a row, its history, the place of its oldest token, and how many it has."""
    fields_ptr = table_ptr + row * table_stride
    end = tl.load(earlier_ptr + row) + tl.load(fields_ptr + POSITION) + 1
    oldest = tl.maximum(end - LENGTH, 0)
    return fields_ptr, history_ptr + row * LENGTH, oldest, end - oldest


@triton.jit
def _lengths(tokens_ptr, oldest, num_tokens, ends, alive, MOST: tl.constexpr, LENGTH: tl.constexpr):
    """Returns for each offset in `ends` how many tokens before it equal the last ones, at most MOST."""
    lengths = tl.zeros_like(ends)
    for i in range(1, MOST + 1):
        token = tl.load(tokens_ptr + (oldest + num_tokens - i) % LENGTH, mask=num_tokens >= i, other=-1)
        alive = alive & (ends >= i)
        alive = alive & (tl.load(tokens_ptr + (oldest + ends - i) % LENGTH, mask=alive, other=-2) == token)
        lengths += alive.to(tl.int32)
    return lengths


@triton.jit
def _store_drafts(
    drafts,
    num_drafts,
    s,
    row,
    fields_ptr,
    drafts_ptr,
    report_ptr,
    drafts_stride,
    report_stride,
    LANES: tl.constexpr,
):
    i = tl.arange(0, LANES)
    out_ptr = report_ptr + s * report_stride
    tl.store(drafts_ptr + row * drafts_stride + i, drafts, mask=i < num_drafts)
    tl.store(out_ptr + report_stride - drafts_stride + i, drafts, mask=i < num_drafts)
    tl.store(fields_ptr + NUM_DRAFTS, num_drafts)
    tl.store(out_ptr + REPORT_DRAFTS, num_drafts)


@triton.jit
def _look_up_kernel(
    rows_ptr,
    table_ptr,
    drafts_ptr,
    history_ptr,
    earlier_ptr,
    report_ptr,
    table_stride,
    drafts_stride,
    report_stride,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s).to(tl.int64)
    if row < 0:
        return
    fields_ptr, tokens_ptr, oldest, num_tokens = _history(
        table_ptr, history_ptr, earlier_ptr, row, table_stride, LENGTH
    )
    best = tl.zeros([WIDE], tl.int32)  # the longest match, and of equals the one that ends first
    for begin in range(1, num_tokens, WIDE):
        ends = begin + tl.arange(0, WIDE)
        lengths = _lengths(tokens_ptr, oldest, num_tokens, ends, ends < num_tokens, MAX_MATCH, LENGTH)
        best = tl.maximum(best, tl.where(lengths >= MIN_MATCH, lengths * SPAN + (SPAN - 1 - ends), 0))
    found = tl.max(best, 0)
    end = SPAN - 1 - found % SPAN
    num_drafts = tl.where(found > 0, tl.minimum(num_tokens - end, DRAFTS), 0)
    i = tl.arange(0, LANES)
    drafts = tl.load(tokens_ptr + (oldest + end + i) % LENGTH, mask=i < num_drafts)
    _store_drafts(
        drafts, num_drafts, s, row, fields_ptr, drafts_ptr, report_ptr, drafts_stride, report_stride, LANES
    )


@triton.jit
def _last_places(tokens_ptr, places_ptr, oldest, num_tokens, LENGTH: tl.constexpr):
    """Writes the last PLACES offsets after which the sequence's last token stood before. Returns their
    number."""
    last = tl.load(tokens_ptr + (oldest + num_tokens - 1) % LENGTH)
    count, top = 0, num_tokens - 1
    while (top > 0) & (count < PLACES):
        ends = top - tl.arange(0, WIDE)
        token = tl.load(tokens_ptr + (oldest + ends - 1) % LENGTH, mask=ends > 0, other=-1)
        is_place = (ends > 0) & (token == last)
        at = count + tl.cumsum(is_place.to(tl.int32), 0) - 1
        tl.store(places_ptr + at, ends, mask=is_place & (at < PLACES))
        count += tl.sum(is_place.to(tl.int32), 0)
        top -= WIDE
    tl.debug_barrier()
    return tl.minimum(count, PLACES)


@triton.jit
def _most_frequent(tokens, is_there, room_ptr, num_places):
    """Returns the most frequent of the tokens that are there, of equals the smallest, and its number. The
    last ones of `room_ptr` are read by all lanes, so barriers stand around the writes."""
    lanes = tl.arange(0, PLACES)
    tl.debug_barrier()
    tl.store(room_ptr + lanes, tl.where(is_there, tokens, -1))
    tl.debug_barrier()
    counts = tl.zeros([PLACES], tl.int32)
    for first in range(0, num_places, FEW):
        few = tl.load(room_ptr + first + tl.arange(0, FEW))
        counts += tl.sum((tokens[:, None] == few[None, :]).to(tl.int32), 1)
    counts = tl.where(is_there, counts, 0)
    most = tl.max(counts, 0)
    return tl.min(tl.where(is_there & (counts == most), tokens, NO_TOKEN), 0), most


@triton.jit
def _look_up_suffix_kernel(
    rows_ptr,
    table_ptr,
    drafts_ptr,
    history_ptr,
    earlier_ptr,
    report_ptr,
    rooms_ptr,
    table_stride,
    drafts_stride,
    report_stride,
    DEPTH: tl.constexpr,
    FACTOR: tl.constexpr,
    MIN_PROBABILITY: tl.constexpr,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s).to(tl.int64)
    if row < 0:
        return
    fields_ptr, tokens_ptr, oldest, num_tokens = _history(
        table_ptr, history_ptr, earlier_ptr, row, table_stride, LENGTH
    )
    room_ptr = rooms_ptr + s * PLACES
    num_places = _last_places(tokens_ptr, room_ptr, oldest, num_tokens, LENGTH)
    lanes, i = tl.arange(0, PLACES), tl.arange(0, LANES)
    ends = tl.load(room_ptr + lanes, mask=lanes < num_places, other=0)
    lengths = _lengths(tokens_ptr, oldest, num_tokens, ends, lanes < num_places, DEPTH, LENGTH)
    longest = tl.max(lengths, 0)
    best_score, num_best, best = tl.full([], 0.0, tl.float64), 0, tl.zeros([LANES], tl.int32)
    size = 1
    while size <= longest:
        limit = (tl.full([], FACTOR, tl.float64) * size).to(tl.int32)
        limit = tl.minimum(tl.minimum(limit, DEPTH - size), DRAFTS)
        alive = lengths >= size
        num, found = 0, tl.zeros([LANES], tl.int32)
        score, probability = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
        goes_on = num < limit
        while goes_on:
            alive = alive & (ends + num < num_tokens)
            total = tl.sum(alive.to(tl.int32), 0)
            tokens = tl.load(tokens_ptr + (oldest + ends + num) % LENGTH, mask=alive, other=NO_TOKEN)
            token, count = tl.min(tokens, 0), total
            if tl.max(tl.where(alive, tokens, token), 0) != token:
                token, count = _most_frequent(tokens, alive, room_ptr, num_places)
            probability *= count.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
            goes_on = (total > 0) & (probability >= tl.full([], MIN_PROBABILITY, tl.float64))
            if goes_on:
                found = tl.where(i == num, token, found)
                score += probability
                alive = alive & (tokens == token)
                num += 1
                goes_on = num < limit
        is_better = (num > 0) & (score >= best_score)
        best_score = tl.where(is_better, score, best_score)
        num_best, best = tl.where(is_better, num, num_best), tl.where(is_better, found, best)
        size += 1
    _store_drafts(
        best, num_best, s, row, fields_ptr, drafts_ptr, report_ptr, drafts_stride, report_stride, LANES
    )


def look_up(
    rows_S: torch.Tensor,
    table: torch.Tensor,
    drafts: DraftRows,
    parameters: LookUp | SuffixLookUp,
    report_SX: torch.Tensor,
) -> None:
    size = rows_S.shape[0]
    if not size:
        return
    tensors = rows_S, table, drafts.drafts_RK, drafts.history_RL, drafts.earlier_R, report_SX
    strides = table.stride(0), drafts.drafts_RK.stride(0), report_SX.stride(0)
    most = parameters.max_drafts
    lanes, length = next_power_of_2(most), drafts.history_RL.shape[1]
    assert length < SPAN.value
    if isinstance(parameters, LookUp):
        _look_up_kernel[(size,)](
            *tensors,
            *strides,
            MIN_MATCH=parameters.min_match,
            MAX_MATCH=parameters.max_match,
            DRAFTS=most,
            LANES=lanes,
            LENGTH=length,
            num_warps=8,
            **pdl_options(),
        )
    else:
        _look_up_suffix_kernel[(size,)](
            *tensors,
            rows_S.new_empty(size, MOST_PLACES),
            *strides,
            DEPTH=parameters.depth,
            FACTOR=parameters.factor,
            MIN_PROBABILITY=parameters.min_probability,
            DRAFTS=most,
            LANES=lanes,
            LENGTH=length,
            num_warps=8,
            **pdl_options(),
            enable_fp_fusion=False,  # sums and products round as the reference's
        )
