"""Sampling in Triton, for a captured graph: launches are fixed, every row has its own fields, and nothing
sorts the vocabulary. reference.py describes what is sampled.

1. `_measure_tiles` has a program for each row and each few tiles of the vocabulary. It finds each tile's
   largest logit and its mass. For a row with filters (top_k, top_p, min_p) it also finds the largest logit of
   each SPAN of tokens.
2. `_pick` has a program for each row. It samples a tile by its mass, then a token of that tile, so that
   noise is made for one tile's tokens only. For a row with filters it first finds the smallest logit that
   they keep, by bisection over the bits of logits. All logits above the best of the other spans lie in the
   BEST_SPANS best spans. If the filters keep no others, which is so for nearly every draw with top_k 20 or
   top_p 0.95, it looks at those spans only. Otherwise it makes passes over the row, which is much slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kernels.sampling import reference
from shoal.kernels.state import MIN_TEMPERATURE, Field

SPAN = tl.constexpr(32)  # tokens that share one maximum
BEST_SPANS = tl.constexpr(128)
WIDE = tl.constexpr(8192)  # tokens of a piece, in a pass over the row

SEED_LOW, SEED_HIGH = tl.constexpr(Field.SEED_LOW.value), tl.constexpr(Field.SEED_HIGH.value)
TEMPERATURE, TOP_K = tl.constexpr(Field.TEMPERATURE.value), tl.constexpr(Field.TOP_K.value)
TOP_P, MIN_P = tl.constexpr(Field.TOP_P.value), tl.constexpr(Field.MIN_P.value)
TOKEN, POSITION = tl.constexpr(Field.TOKEN.value), tl.constexpr(Field.POSITION.value)
COLDEST = tl.constexpr(MIN_TEMPERATURE)
MIX_1, MIX_2 = tl.constexpr(reference.MIX_1), tl.constexpr(reference.MIX_2)
SALT_0, SALT_1 = tl.constexpr(reference.SALT_0), tl.constexpr(reference.SALT_1)
LOWEST = tl.constexpr(-3.4e38)  # below every finite logit, above -inf
KEY_OF_NOTHING = tl.constexpr(-0x7F800001)  # the order key of -inf
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MAX_UNIFORM = tl.constexpr(reference.MAX_UNIFORM)
TILE = tl.constexpr(reference.TILE)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 15)


@triton.jit
def _noise_keys(fields_ptr, position):
    low = tl.load(fields_ptr + SEED_LOW, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    high = tl.load(fields_ptr + SEED_HIGH, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    position = position.to(tl.uint32, bitcast=True)
    return _mix(position ^ _mix(high ^ _mix(low ^ SALT_0))), _mix(low + _mix(high + _mix(position + SALT_1)))


@triton.jit
def _log(x):
    """Returns the logarithm by the hardware's log2, which is right to 2**-22. An exact one would be half of
    all instructions, and noise does not need the last bits."""
    if INTERPRETED:
        return tl.log(x)
    else:  # noqa: RET505 -- decided while compiling
        return (
            tl.inline_asm_elementwise(
                "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
            * LN_2
        )


@triton.jit
def _gumbel(key_0, key_1, token):
    h = (token.to(tl.uint32, bitcast=True) ^ key_0) * MIX_1
    h = (h ^ (h >> 15) ^ key_1) * MIX_2
    h = (h ^ (h >> 15)) >> 1
    u = tl.minimum(h.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31 + 2.0**-32, MAX_UNIFORM)
    # -log(1 - u) is computed by its series where 1 - u would round u away.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 0.0625, series, -_log(1.0 - u))
    return -_log(exponential)


@triton.jit
def _load_float(ptr):
    return tl.load(ptr, cache_modifier=".cg").to(tl.float32, bitcast=True)


@triton.jit
def _has_filters(fields_ptr):
    top_k = tl.load(fields_ptr + TOP_K, cache_modifier=".cg")
    return (top_k > 0) | (_load_float(fields_ptr + TOP_P) < 1.0) | (_load_float(fields_ptr + MIN_P) > 0.0)


@triton.jit
def _workspace(work_ptr, s, V: tl.constexpr):
    """Returns the four parts of a row's scratch memory: the largest logit of each tile, the mass of each tile
    relative to that, the largest logit of each span, and a list of spans."""
    tiles: tl.constexpr = (V + TILE - 1) // TILE
    spans: tl.constexpr = (V + SPAN - 1) // SPAN
    best_ptr = work_ptr + s * (2 * tiles + spans + BEST_SPANS)
    list_ptr = (best_ptr + 2 * tiles + spans).to(tl.pointer_type(tl.int32), bitcast=True)
    return best_ptr, best_ptr + tiles, best_ptr + 2 * tiles, list_ptr


@triton.jit
def _measure_tiles(
    logits_ptr,
    rows_ptr,
    table_ptr,
    work_ptr,
    logits_stride,
    table_stride,
    V: tl.constexpr,
    TILES: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """OFFSET tokens of the first tile lie before the row's first column (split_sample_triton.py)."""
    start_next(PDL)
    s = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = token < V
    if OFFSET:
        inside &= token >= OFFSET
    row_ptr = logits_ptr + s * logits_stride - OFFSET
    if TILES > 1:  # Most programs have nothing to wait for, so they load everything at once.
        wait_for_previous(PDL)
        loaded = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
    row = tl.load(rows_ptr + s, cache_modifier=".cg").to(tl.int64)
    # These are constants of the step. With few rows they are read before the wait.
    fields_ptr = table_ptr + tl.maximum(row, 0) * table_stride
    has_filters = _has_filters(fields_ptr)
    scale = 1.0 / tl.maximum(_load_float(fields_ptr + TEMPERATURE), COLDEST)
    if TILES == 1:
        wait_for_previous(PDL)
        loaded = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
    if row < 0:
        return
    logits = loaded.to(tl.float32)
    best_ptr, mass_ptr, span_ptr, _ = _workspace(work_ptr, s, V)
    if has_filters:
        span = tl.program_id(0) * (TILES * TILE // SPAN) + tl.arange(0, TILES * TILE // SPAN)
        tl.store(
            span_ptr + span,
            tl.max(tl.reshape(logits, (TILES * TILE // SPAN, SPAN)), axis=1),
            mask=span * SPAN < V,
        )
    best = tl.max(logits, axis=1)
    masses = tl.where(logits > float("-inf"), tl.exp((logits - best[:, None]) * scale), 0.0)
    tl.store(best_ptr + tile, best, mask=tile * TILE < V)
    tl.store(mass_ptr + tile, tl.sum(masses, axis=1), mask=tile * TILE < V)


@triton.jit
def _order_key(logits, SHIFT: tl.constexpr):
    """Returns int32s that have the order of the floats. SHIFT removes the bits that are constant in a 16-bit
    float."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)  # (low + high) // 2 without overflow


@triton.jit
def _best_spans(span_ptr, list_ptr, largest, V: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Lists the spans with the largest maxima, at most BEST_SPANS of them. Returns their number, and the
    largest logit of all other spans."""
    span = tl.arange(0, BLOCK)
    span_best = tl.load(span_ptr + span, mask=span * SPAN < V, other=float("-inf"))
    keys = _order_key(span_best, SHIFT)
    low, high = KEY_OF_NOTHING >> SHIFT, _order_key(largest, SHIFT) + 1
    while low + 1 < high:
        middle = _middle(low, high)
        few = tl.sum((keys >= middle).to(tl.int32), axis=0) <= BEST_SPANS
        low, high = tl.where(few, low, middle), tl.where(few, middle, high)
    listed = keys >= high
    tl.store(list_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, span, mask=listed)
    tl.debug_barrier()  # Other threads read the list.
    return tl.sum(listed.to(tl.int32), axis=0), tl.max(tl.where(listed, float("-inf"), span_best), axis=0)


@triton.jit
def _load_spans(row_ptr, list_ptr, num_listed, V: tl.constexpr, OFFSET: tl.constexpr = 0):
    """Returns the logits of the listed spans and their tokens, [BEST_SPANS * SPAN]."""
    i = tl.arange(0, BEST_SPANS * SPAN)
    listed = i // SPAN < num_listed
    token = tl.load(list_ptr + i // SPAN, mask=listed, other=0) * SPAN + i % SPAN
    inside = listed & (token < V)
    if OFFSET:
        inside &= token >= OFFSET
    return tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32), token


@triton.jit
def _weigh(logits, key, floor, largest, scale, BY_MASS: tl.constexpr, SHIFT: tl.constexpr):
    """Returns the mass, or 1, of each logit of at least `key` and `floor`, and 0 for the others and for
    -inf."""
    kept = (_order_key(logits, SHIFT) >= key) & (logits >= floor)
    return tl.where(kept, tl.exp((logits - largest) * scale) if BY_MASS else 1.0, 0.0)


@triton.jit
def _measure(
    row_ptr,
    list_ptr,
    num_listed,
    wide,
    key,
    floor,
    largest,
    scale,
    V: tl.constexpr,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Returns the mass, or the number, of the logits of at least `key` and `floor`, in the listed spans, or
    with `wide` in the whole row."""
    if wide:
        sums = tl.zeros((WIDE,), tl.float32)
        for start in range(0, V, WIDE):
            token = start + tl.arange(0, WIDE)
            logits = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
            sums += _weigh(logits, key, floor, largest, scale, BY_MASS, SHIFT)
        measure = tl.sum(sums, axis=0)
    else:
        logits, _ = _load_spans(row_ptr, list_ptr, num_listed, V)
        measure = tl.sum(_weigh(logits, key, floor, largest, scale, BY_MASS, SHIFT), axis=0)
    return measure


@triton.jit
def _largest_key(
    row_ptr,
    list_ptr,
    num_listed,
    wide,
    low,
    target,
    floor,
    largest,
    scale,
    V: tl.constexpr,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Returns the largest key that leaves a mass, or a number, of at least `target`, and `low` if no key
    above it does."""
    high = _order_key(largest, SHIFT) + 1
    while low + 1 < high:
        middle = _middle(low, high)
        enough = (
            _measure(row_ptr, list_ptr, num_listed, wide, middle, floor, largest, scale, V, BY_MASS, SHIFT)
            >= target
        )
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _sample_filtered(
    row_ptr,
    fields_ptr,
    span_ptr,
    list_ptr,
    largest,
    total,
    temperature,
    key_0,
    key_1,
    V: tl.constexpr,
    SPANS_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Draws a token of a row with filters. `total` is the mass of all its logits, relative to the largest."""
    top_k = tl.load(fields_ptr + TOP_K, cache_modifier=".cg")
    top_p, min_p = _load_float(fields_ptr + TOP_P), _load_float(fields_ptr + MIN_P)
    scale = 1.0 / temperature
    floor = tl.where(
        min_p > 0.0, tl.maximum(largest + temperature * tl.log(tl.maximum(min_p, 1e-38)), LOWEST), LOWEST
    )
    num_listed, rest = _best_spans(span_ptr, list_ptr, largest, V, SPANS_BLOCK, SHIFT)

    # Everything above `rest` is in the listed spans. Does what the filters keep lie above it?
    key = _order_key(rest, SHIFT)
    number = _measure(row_ptr, list_ptr, num_listed, False, key + 1, LOWEST, largest, scale, V, False, SHIFT)
    mass = _measure(row_ptr, list_ptr, num_listed, False, key + 1, LOWEST, largest, scale, V, True, SHIFT)
    only_top_p = (top_k == 0) & (min_p == 0.0)
    wide = (floor <= rest) & ((top_k == 0) | (number < top_k)) & ((not only_top_p) | (mass < top_p * total))
    key = tl.where(wide, KEY_OF_NOTHING >> SHIFT, key)

    if top_k > 0:
        key = _largest_key(
            row_ptr, list_ptr, num_listed, wide, key, top_k, floor, largest, scale, V, False, SHIFT
        )
    if top_p < 1.0:
        if not only_top_p:
            total = _measure(row_ptr, list_ptr, num_listed, wide, key, floor, largest, scale, V, True, SHIFT)
        key = _largest_key(
            row_ptr, list_ptr, num_listed, wide, key, top_p * total, floor, largest, scale, V, True, SHIFT
        )

    if wide:
        best = tl.full((WIDE,), float("-inf"), tl.float32)
        best_token = tl.arange(0, WIDE)
        for start in range(0, V, WIDE):
            token = start + tl.arange(0, WIDE)
            logits = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
            kept = (_order_key(logits, SHIFT) >= key) & (logits >= floor)
            score = tl.where(kept, logits * scale + _gumbel(key_0, key_1, token), float("-inf"))
            best_token = tl.where(score > best, token, best_token)
            best = tl.maximum(score, best)
        _, at = tl.max(best, axis=0, return_indices=True)
        sampled = tl.sum(tl.where(tl.arange(0, WIDE) == at, best_token, 0), axis=0)
    else:
        logits, token = _load_spans(row_ptr, list_ptr, num_listed, V)
        kept = (_order_key(logits, SHIFT) >= key) & (logits >= floor)
        score = tl.where(kept, logits * scale + _gumbel(key_0, key_1, token), float("-inf"))
        _, at = tl.max(score, axis=0, return_indices=True)
        sampled = tl.load(list_ptr + at // SPAN) * SPAN + at % SPAN
    return sampled


@triton.jit
def _sample(row_ptr, tile, best, mass, largest, temperature, key_0, key_1, V: tl.constexpr):
    """Draws a token of a row without filters: a tile by its mass, then a token of it. A greedy row gets its
    largest logit."""
    is_sampled = temperature >= COLDEST
    scale = tl.where(is_sampled, 1.0 / tl.maximum(temperature, COLDEST), 1.0)
    tile_score = (best - largest) * scale
    if is_sampled:
        tile_score += tl.log(mass) + _gumbel(key_0, key_1, -1 - tile)
    _, tile = tl.max(tile_score, axis=0, return_indices=True)
    token = tile * TILE + tl.arange(0, TILE)
    score = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32) * scale
    if is_sampled:
        score += _gumbel(key_0, key_1, token)
    _, at = tl.max(score, axis=0, return_indices=True)
    return tile * TILE + at


@triton.jit
def _pick(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    table_ptr,
    out_ptr,
    work_ptr,
    logits_stride,
    table_stride,
    V: tl.constexpr,
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
    key_0, key_1 = _noise_keys(fields_ptr, position)
    wait_for_previous(PDL)
    if row < 0:
        return
    row_ptr = logits_ptr + s * logits_stride
    best_ptr, mass_ptr, span_ptr, list_ptr = _workspace(work_ptr, s, V)
    tile = tl.arange(0, TILES_BLOCK)
    in_row = tile * TILE < V
    best = tl.load(best_ptr + tile, mask=in_row, other=float("-inf"))
    mass = tl.load(mass_ptr + tile, mask=in_row, other=0.0)
    largest = tl.max(best, axis=0)
    if has_filters:
        total = tl.sum(mass * tl.exp((best - largest) * (1.0 / temperature)), axis=0)
        sampled = _sample_filtered(
            row_ptr,
            fields_ptr,
            span_ptr,
            list_ptr,
            largest,
            total,
            temperature,
            key_0,
            key_1,
            V,
            SPANS_BLOCK,
            SHIFT,
        )
    else:
        sampled = _sample(row_ptr, tile, best, mass, largest, temperature, key_0, key_1, V)
    sampled = tl.minimum(tl.maximum(sampled, 0), V - 1)  # With logits of NaN it would be a wild address.
    tl.store(out_ptr + s, sampled)
    tl.store(fields_ptr + TOKEN, sampled)
    tl.store(fields_ptr + POSITION, position)


PICK_WARPS = 16
# how many bits of a float32 each type does not have
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample(
    logits_BV: torch.Tensor,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    table: torch.Tensor,
    out_tokens_S: torch.Tensor,
) -> None:
    """Draws a token for each s with rows_S[s] >= 0, and writes it into out_tokens_S and into its state
    row."""
    assert logits_BV.stride(1) == 1
    num_seqs, vocab_size = rows_S.shape[0], logits_BV.shape[1]
    num_tiles, num_spans = cdiv(vocab_size, TILE.value), cdiv(vocab_size, SPAN.value)
    work = torch.empty(
        (num_seqs, 2 * num_tiles + num_spans + BEST_SPANS.value), dtype=torch.float32, device=logits_BV.device
    )
    tiles = tiles_per_program(num_seqs)
    _measure_tiles[(cdiv(num_tiles, tiles), num_seqs)](
        logits_BV,
        rows_S,
        table,
        work,
        logits_BV.stride(0),
        table.stride(0),
        V=vocab_size,
        TILES=tiles,
        OFFSET=0,
        # With one warp a tile's sums need no barrier, and are the same for few rows and for many.
        num_warps=1,
        **pdl_options(),
    )
    _pick[(num_seqs,)](
        logits_BV,
        rows_S,
        positions_S,
        table,
        out_tokens_S,
        work,
        logits_BV.stride(0),
        table.stride(0),
        V=vocab_size,
        TILES_BLOCK=next_power_of_2(num_tiles),
        SPANS_BLOCK=next_power_of_2(num_spans),
        SHIFT=SHIFTS[logits_BV.dtype],
        num_warps=PICK_WARPS,
        **pdl_options(),
    )


def tiles_per_program(num_seqs: int) -> int:
    """Few rows are cut into many small programs, to occupy the GPU. With many rows each program has more
    loads in flight (benchmarks/results/kernels.md)."""
    return 1 if num_seqs <= 16 else 2
