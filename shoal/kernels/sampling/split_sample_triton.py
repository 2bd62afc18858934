"""split_sample.py in Triton, for a captured graph: parts of a rank's columns, and the draw from all ranks'
parts.

The tiles and spans of sample.py are counted from the whole row's first token, as noise is. So a rank's first
tile may begin before its columns do, by OFFSET tokens: what lies there is masked, and V counts it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kernels.sampling.sample import (
    BEST_SPANS,
    COLDEST,
    KEY_OF_NOTHING,
    LOWEST,
    MIN_P,
    PICK_WARPS,
    POSITION,
    SHIFTS,
    SPAN,
    TEMPERATURE,
    TILE,
    TOKEN,
    TOP_K,
    TOP_P,
    _best_spans,
    _gumbel,
    _has_filters,
    _load_float,
    _load_spans,
    _measure_tiles,
    _middle,
    _noise_keys,
    _order_key,
    _workspace,
    tiles_per_program,
)
from shoal.kernels.sampling.split_sample import PARTS as NUM_PARTS
from shoal.kernels.sampling.split_sample import TILE_PARTS as NUM_TILE_PARTS
from shoal.kernels.sampling.split_sample import Part

PARTS, PART_INTS = tl.constexpr(NUM_PARTS), tl.constexpr(len(Part))
PART_MEASURE, PART_NUMBER = tl.constexpr(Part.MEASURE.value), tl.constexpr(Part.NUMBER.value)
PART_SCORE, PART_TOKEN = tl.constexpr(Part.SCORE.value), tl.constexpr(Part.TOKEN.value)
TILE_PARTS = tl.constexpr(NUM_TILE_PARTS)
PASS = tl.constexpr(2048)  # tokens of a piece, in a pass over the row
JOIN_WARPS = 4


@triton.jit
def _store_part(part_ptr, i, measure, number, score, token):
    ptr = part_ptr + i * PART_INTS
    tl.store(ptr + PART_MEASURE, measure.to(tl.int32, bitcast=True))
    tl.store(ptr + PART_NUMBER, number)
    tl.store(ptr + PART_SCORE, score.to(tl.int32, bitcast=True))
    tl.store(ptr + PART_TOKEN, token)


@triton.jit
def _tile_parts(
    row_ptr,
    part_ptr,
    best,
    mass,
    temperature,
    key_0,
    key_1,
    V: tl.constexpr,
    FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
):
    """Stores the parts of a row without filters, and returns their number."""
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    tile = tl.arange(0, TILES_BLOCK)
    is_sampled = temperature >= COLDEST
    scale = tl.where(is_sampled, 1.0 / tl.maximum(temperature, COLDEST), 1.0)
    measure = best * scale
    noisy = measure
    if is_sampled:
        measure += tl.log(tl.maximum(mass, 1e-30))  # zero beyond the row
        between = (tile > 0) & (tile < tiles - 1)
        noisy = tl.where(between, measure + _gumbel(key_0, key_1, -1 - (tile + FIRST // TILE)), float("-inf"))
    _, chosen = tl.max(noisy, axis=0, return_indices=True)
    most: tl.constexpr = 3 if tiles > 3 else tiles
    count = tl.where(is_sampled, most, 1)
    for i in range(count):
        at = chosen
        if is_sampled & (i < 2):  # the first tile and the last one; the sampled one between them comes third
            at = i * (tiles - 1)
        place = at * TILE + tl.arange(0, TILE)
        inside = (place >= OFFSET) & (place < V)
        score = tl.load(row_ptr + place, mask=inside, other=float("-inf")).to(tl.float32) * scale
        if is_sampled:
            score += _gumbel(key_0, key_1, place + (FIRST - OFFSET))
        best_score, best_place = tl.max(score, axis=0, return_indices=True)
        token = at * TILE + best_place + (FIRST - OFFSET)
        of_tile = tl.sum(tl.where(tile == at, measure, 0.0), axis=0)
        _store_part(part_ptr, i, of_tile, at + FIRST // TILE, best_score, token)
    return count


@triton.jit
def _value_parts(
    row_ptr,
    part_ptr,
    span_ptr,
    list_ptr,
    largest,
    top_k,
    scale,
    key_0,
    key_1,
    V: tl.constexpr,
    FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
    SPANS_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Stores the parts of a row with top_k, the largest value first, and returns their number."""
    num_listed, rest = _best_spans(span_ptr, list_ptr, largest, V, SPANS_BLOCK, SHIFT)
    listed, place = _load_spans(row_ptr, list_ptr, num_listed, V, OFFSET)
    listed_keys, listed_tokens = _order_key(listed, SHIFT), place + (FIRST - OFFSET)
    listed_scores = listed * scale + _gumbel(key_0, key_1, listed_tokens)
    # Everything above `rest` is in the listed spans. If that is too little, each value takes a pass over the
    # row.
    wide = tl.sum((listed_keys > _order_key(rest, SHIFT)).to(tl.int32), axis=0) < top_k
    below = _order_key(largest, SHIFT) + 1
    count, taken = 0, 0
    more = taken < top_k
    while more:
        if wide:
            values = tl.full((PASS,), float("-inf"), tl.float32)
            scores = tl.full((PASS,), float("-inf"), tl.float32)
            numbers, tokens = tl.zeros((PASS,), tl.int32), tl.zeros((PASS,), tl.int32)
            for start in range(0, V, PASS):
                at_place = start + tl.arange(0, PASS)
                inside = (at_place >= OFFSET) & (at_place < V)
                logits = tl.load(row_ptr + at_place, mask=inside, other=float("-inf")).to(tl.float32)
                logits = tl.where(_order_key(logits, SHIFT) < below, logits, float("-inf"))
                noisy = logits * scale + _gumbel(key_0, key_1, at_place + (FIRST - OFFSET))
                is_new, is_same = logits > values, logits == values
                is_better = is_new | (is_same & (noisy > scores))
                numbers = tl.where(is_new, 1, numbers + is_same.to(tl.int32))
                scores = tl.where(is_better, noisy, scores)
                tokens = tl.where(is_better, at_place + (FIRST - OFFSET), tokens)
                values = tl.maximum(values, logits)
            value = tl.max(values, axis=0)
            number = tl.sum(tl.where(values == value, numbers, 0), axis=0)
            score, at = tl.max(tl.where(values == value, scores, float("-inf")), axis=0, return_indices=True)
            token = tl.sum(tl.where(tl.arange(0, PASS) == at, tokens, 0), axis=0)
        else:
            value = tl.max(tl.where(listed_keys < below, listed, float("-inf")), axis=0)
            has_it = (listed == value) & (listed_keys < below)
            number = tl.sum(has_it.to(tl.int32), axis=0)
            score, at = tl.max(tl.where(has_it, listed_scores, float("-inf")), axis=0, return_indices=True)
            token = tl.sum(tl.where(tl.arange(0, BEST_SPANS * SPAN) == at, listed_tokens, 0), axis=0)
        found = value >= LOWEST
        if found:
            _store_part(part_ptr, count, value, number, score, token)
            count += 1
            taken += number
        below = _order_key(value, SHIFT)
        more = found & (taken < top_k) & (count < PARTS)
    return count


@triton.jit
def _parts_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    table_ptr,
    parts_ptr,
    work_ptr,
    logits_stride,
    table_stride,
    V: tl.constexpr,
    FIRST: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    SPANS_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions_ptr + s, cache_modifier=".cg") + 1
    fields_ptr = table_ptr + tl.maximum(row, 0) * table_stride
    temperature = _load_float(fields_ptr + TEMPERATURE)
    has_filters = (temperature >= COLDEST) & _has_filters(fields_ptr)
    top_k = tl.load(fields_ptr + TOP_K, cache_modifier=".cg")
    key_0, key_1 = _noise_keys(fields_ptr, position)
    wait_for_previous(PDL)
    if row < 0:
        return
    row_ptr = logits_ptr + s * logits_stride - OFFSET
    part_ptr = parts_ptr + s * PARTS * PART_INTS
    best_ptr, mass_ptr, span_ptr, list_ptr = _workspace(work_ptr, s, V)
    tile = tl.arange(0, TILES_BLOCK)
    in_row = tile * TILE < V
    best = tl.load(best_ptr + tile, mask=in_row, other=float("-inf"))
    mass = tl.load(mass_ptr + tile, mask=in_row, other=0.0)
    if has_filters:
        count = _value_parts(
            row_ptr,
            part_ptr,
            span_ptr,
            list_ptr,
            tl.max(best, axis=0),
            top_k,
            1.0 / temperature,
            key_0,
            key_1,
            V,
            FIRST,
            OFFSET,
            SPANS_BLOCK,
            SHIFT,
        )
    else:
        count = _tile_parts(
            row_ptr, part_ptr, best, mass, temperature, key_0, key_1, V, FIRST, OFFSET, TILES_BLOCK
        )
    i = tl.arange(0, PARTS)
    tl.store(part_ptr + i * PART_INTS + PART_TOKEN, tl.full((PARTS,), -1, tl.int32), mask=i >= count)


def sample_parts(
    logits_SV: torch.Tensor, first: int, rows_S: torch.Tensor, positions_S: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    assert logits_SV.stride(1) == 1
    offset = first % TILE.value
    num_seqs, places = rows_S.shape[0], offset + logits_SV.shape[1]
    num_tiles, num_spans = cdiv(places, TILE.value), cdiv(places, SPAN.value)
    work_size = 2 * num_tiles + num_spans + BEST_SPANS.value
    work = torch.empty((num_seqs, work_size), dtype=torch.float32, device=logits_SV.device)
    parts = torch.empty((num_seqs, PARTS.value, PART_INTS.value), dtype=torch.int32, device=logits_SV.device)
    tiles = tiles_per_program(num_seqs)
    _measure_tiles[(cdiv(num_tiles, tiles), num_seqs)](
        logits_SV,
        rows_S,
        table,
        work,
        logits_SV.stride(0),
        table.stride(0),
        V=places,
        TILES=tiles,
        OFFSET=offset,
        num_warps=1,
        **pdl_options(),
    )
    _parts_kernel[(num_seqs,)](
        logits_SV,
        rows_S,
        positions_S,
        table,
        parts,
        work,
        logits_SV.stride(0),
        table.stride(0),
        V=places,
        FIRST=first,
        OFFSET=offset,
        TILES_BLOCK=next_power_of_2(num_tiles),
        SPANS_BLOCK=next_power_of_2(num_spans),
        SHIFT=SHIFTS[logits_SV.dtype],
        num_warps=PICK_WARPS,
        **pdl_options(),
    )
    return parts


@triton.jit
def _load_parts(parts_ptr, s, i, num_seqs, RANKS: tl.constexpr, OF_RANK: tl.constexpr):
    """The first OF_RANK parts of each rank for sample s: measures (-inf where there is no such part),
    numbers, scores and tokens."""
    rank = (i // OF_RANK).to(tl.int64)
    ptr = parts_ptr + ((rank * num_seqs + s) * PARTS + i % OF_RANK) * PART_INTS
    token = tl.load(ptr + PART_TOKEN, mask=rank < RANKS, other=-1)
    used = token >= 0
    measure = tl.load(ptr + PART_MEASURE, mask=used, other=0).to(tl.float32, bitcast=True)
    number = tl.load(ptr + PART_NUMBER, mask=used, other=0)
    score = tl.load(ptr + PART_SCORE, mask=used, other=0).to(tl.float32, bitcast=True)
    return tl.where(used, measure, float("-inf")), number, tl.where(used, score, float("-inf")), token


@triton.jit
def _smallest_kept(keys, weights, target, largest, SHIFT: tl.constexpr):
    """The largest key that leaves a weight of at least `target`, or the key of nothing."""
    low, high = KEY_OF_NOTHING >> SHIFT, _order_key(largest, SHIFT) + 1
    while low + 1 < high:
        middle = _middle(low, high)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), axis=0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _join_values(
    parts_ptr,
    s,
    num_seqs,
    fields_ptr,
    temperature,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The token that is sampled of a row with top_k."""
    i = tl.arange(0, BLOCK)
    measure, number, score, token = _load_parts(parts_ptr, s, i, num_seqs, RANKS, PARTS)
    top_k = tl.load(fields_ptr + TOP_K, cache_modifier=".cg")
    top_p, min_p = _load_float(fields_ptr + TOP_P), _load_float(fields_ptr + MIN_P)
    largest = tl.max(measure, axis=0)
    floor = tl.where(
        min_p > 0.0, tl.maximum(largest + temperature * tl.log(tl.maximum(min_p, 1e-38)), LOWEST), LOWEST
    )
    keys, numbers = _order_key(measure, SHIFT), tl.where(measure >= floor, number.to(tl.float32), 0.0)
    key = _smallest_kept(keys, numbers, top_k.to(tl.float32), largest, SHIFT)
    if top_p < 1.0:
        masses = tl.where(
            (keys >= key) & (numbers > 0.0), numbers * tl.exp((measure - largest) * (1.0 / temperature)), 0.0
        )
        key = tl.maximum(key, _smallest_kept(keys, masses, top_p * tl.sum(masses, axis=0), largest, SHIFT))
    _, at = tl.max(
        tl.where((keys >= key) & (numbers > 0.0), score, float("-inf")), axis=0, return_indices=True
    )
    return tl.sum(tl.where(i == at, token, 0), axis=0)


@triton.jit
def _join_tiles(parts_ptr, s, num_seqs, temperature, key_0, key_1, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """The token that is sampled of a row without filters: a tile by the mass of all its parts, then the best
    token of these."""
    i = tl.arange(0, BLOCK)
    _measure, tile, score, token = _load_parts(parts_ptr, s, i, num_seqs, RANKS, TILE_PARTS)
    if temperature >= COLDEST:
        # The same parts once more, along the other axis.
        other, other_tile, _0, _1 = _load_parts(parts_ptr, s, i[None, :], num_seqs, RANKS, TILE_PARTS)
        of_tile = tl.where(other_tile == tile[:, None], other, float("-inf"))
        most = tl.maximum(tl.max(of_tile, axis=1), LOWEST)
        mass = most + tl.log(tl.sum(tl.exp(of_tile - most[:, None]), axis=1))
        noisy = tl.where(token >= 0, mass + _gumbel(key_0, key_1, -1 - tile), float("-inf"))
        _, at = tl.max(noisy, axis=0, return_indices=True)
        score = tl.where(tile == tl.sum(tl.where(i == at, tile, 0), axis=0), score, float("-inf"))
    _, at = tl.max(score, axis=0, return_indices=True)
    return tl.sum(tl.where(i == at, token, 0), axis=0)


@triton.jit
def _join_kernel(
    parts_ptr,
    rows_ptr,
    positions_ptr,
    table_ptr,
    out_ptr,
    num_seqs,
    table_stride,
    RANKS: tl.constexpr,
    VALUES_BLOCK: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions_ptr + s, cache_modifier=".cg") + 1
    fields_ptr = table_ptr + tl.maximum(row, 0) * table_stride
    temperature = _load_float(fields_ptr + TEMPERATURE)
    has_filters = (temperature >= COLDEST) & _has_filters(fields_ptr)
    key_0, key_1 = _noise_keys(fields_ptr, position)
    wait_for_previous(PDL)
    if row < 0:
        return
    if has_filters:
        sampled = _join_values(parts_ptr, s, num_seqs, fields_ptr, temperature, RANKS, VALUES_BLOCK, SHIFT)
    else:
        sampled = _join_tiles(parts_ptr, s, num_seqs, temperature, key_0, key_1, RANKS, TILES_BLOCK)
    sampled = tl.maximum(sampled, 0)  # With logits of NaN it might be none.
    tl.store(out_ptr + s, sampled)
    tl.store(fields_ptr + TOKEN, sampled)
    tl.store(fields_ptr + POSITION, position)


def join_parts(
    parts_RSP: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    table: torch.Tensor,
    out_tokens_S: torch.Tensor,
) -> None:
    assert parts_RSP.is_contiguous()
    ranks, num_seqs = parts_RSP.shape[:2]
    _join_kernel[(num_seqs,)](
        parts_RSP,
        rows_S,
        positions_S,
        table,
        out_tokens_S,
        num_seqs,
        table.stride(0),
        RANKS=ranks,
        VALUES_BLOCK=next_power_of_2(ranks * PARTS.value),
        TILES_BLOCK=next_power_of_2(ranks * TILE_PARTS.value),
        # Measures are float32. Of 16-bit logits their low bits are 0, which only costs passes.
        SHIFT=0,
        num_warps=JOIN_WARPS,
        **pdl_options(),
    )
