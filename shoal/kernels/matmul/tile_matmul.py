"""Matmuls by tensor cores with weights of any format, in Triton: rows of one weight, or of many experts.

The weight is the left operand, so that few rows are padded to 16 only, and sums are [outputs, rows]. How
weights of a format get there is in loaders.py. A program has a block of outputs, a block of rows, and with
splits a part of the inputs: if there are few outputs, the inputs are split, so that all SMs read, and the
last program of a tile to arrive adds the parts in a fixed order. Bits do not depend on timing.

A row map says which rows a program multiplies, and with the weight of which expert:

NO_MAP   rows of one weight, in order.
LISTED   a tile of the list of slots (moe.py), which is sorted by experts. A slot is a pair of a token and one
         of its K choices. An expert's first matmul gathers the rows of the slots' tokens (GATHERS) and writes
         in the list's order; its second one reads in that order and scatters to slots.
SLOTS    one slot, for few tokens, whose experts are taken as they come. SUM: the K slots of a token are parts
         of one sum, too. The last of their programs adds them, times the router's weights.

GATED: the weight is gate over up, and their activation leaves the kernel; relu2 takes up alone. ADD: the
matmul, rounded as one of its own, is added to what the output holds, the residual.

T rows (tokens or slots with SLOTS) · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows).
The oracle is reference.py with the unpacked weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import activate
from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.matmul.dispatch import MAX_SPLIT_TILES, RowTiles
from shoal.kernels.matmul.loaders import (
    FP8,
    FP8_STEP,
    LARGER_BF16,
    LARGER_FP16,
    PLAIN,
    TILED,
    Fp8Matrix,
    TiledWeight,
    first_ptrs,
    rows_of_step,
    settled,
    weights_of_step,
)
from shoal.kernels.matmul.shared_memory import fitting_stages
from shoal.kernels.matmul.split_k import arrival_counters, arrives_last
from shoal.kernels.pdl import pdl_options, prefetch, wait_for_inputs
from shoal.kernels.rounding import cdiv
from shoal.kinds.experts import Activation

NO_MAP, LISTED, SLOTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
Weight = torch.Tensor | Fp8Matrix | TiledWeight


@triton.jit
def _rows(
    map_ptr,
    slots_ptr,
    T,
    MAP: tl.constexpr,
    K: tl.constexpr,
    GATHERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Returns this program's expert (-1: it has no rows), and for each row of its block where it is read and
    written, and a mask. `map_ptr`: the list's tiles, or the slots' experts."""
    row = tl.arange(0, BLOCK_T)
    if MAP == NO_MAP:
        row = (tl.program_id(0) * BLOCK_T + row).to(tl.int64)
        expert = tl.zeros((), tl.int64)
        inside = row < T
        source, target = tl.minimum(row, T - 1), row
    elif MAP == LISTED:
        tile_ptr = map_ptr + tl.program_id(1) * 3
        expert = tl.load(tile_ptr).to(tl.int64)
        row += tl.load(tile_ptr + 1)
        inside = row < tl.load(tile_ptr + 2)
        slot = tl.load(slots_ptr + row, mask=inside, other=0).to(tl.int64)
        row = tl.where(inside, row, 0).to(tl.int64)
        if GATHERS:
            source, target = slot // K, row
        else:
            source, target = row, slot
    else:
        slot = tl.program_id(1) * (tl.num_programs(2) // SPLITS) + tl.program_id(2) // SPLITS
        expert = tl.load(map_ptr + slot).to(tl.int64)
        inside = row == 0
        source = tl.zeros((BLOCK_T,), tl.int64) + (slot // K if GATHERS else slot)
        target = tl.zeros((BLOCK_T,), tl.int64) + tl.program_id(1)
    return expert, source, target, inside


@triton.jit
def gate_with_up(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Gate and up, float32, to the output of their Activation (kinds/experts.py)."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        result = activate(gate, ACTIVATION) * up
    return result


@triton.jit
def _prefetch_bytes(weight_ptr, out, start, end, O, I, PDL: tl.constexpr):
    """Prefetches inputs [start, end), multiples of 32, of outputs `out` of a weight of bytes, each row in two
    halves, so that all threads have one."""
    half = tl.arange(0, 2)[None, :]
    num_bytes = tl.maximum(end - start, 0) // 2
    ptr = weight_ptr.to(tl.pointer_type(tl.int8)) + out.to(tl.int64)[:, None] * I + start + half * num_bytes
    prefetch(ptr, tl.where((out < O)[:, None], num_bytes, 0) + half * 0, PDL)


@triton.jit(do_not_specialize=["T", "rounds"])
def tile_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    out_ptr,
    map_ptr,
    slots_ptr,
    shares_ptr,
    parts_ptr,
    arrived_ptr,
    O,
    I,
    T,
    weight_rows,
    rounds,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    MAP: tl.constexpr,
    K: tl.constexpr,
    GATHERS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies over `rounds` rounds of STEPS steps of COLUMNS inputs. EVEN: the inputs are whole rounds.
    EARLY: L2 is asked for as many rounds of bytes of weights before the rows are there.
    SCALED: sums get the scales of fp8, each round's if there are groups, `weight_rows` scales a group."""
    MINIMA: tl.constexpr = minima_ptr is not None
    SUM: tl.constexpr = shares_ptr is not None
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    BY_GROUP: tl.constexpr = SCALED and SCALE_GROUP > 0
    WIDE: tl.constexpr = STEPS * COLUMNS
    block, rows_block = tl.program_id(0), tl.program_id(1)
    if MAP == NO_MAP:  # Programs that run at once share weights; those of a map have few rows of an expert.
        block, rows_block = tl.program_id(1), tl.program_id(0)
    else:
        wait_for_inputs(PDL)
    expert, source, target, inside = _rows(map_ptr, slots_ptr, T, MAP, K, GATHERS, SPLITS, BLOCK_T)
    if MAP == LISTED and expert < 0:
        return
    ptrs, scales_ptrs, minima_ptrs, to_up, scales_to_up = first_ptrs(
        weight_ptr,
        scales_ptr,
        minima_ptr,
        expert,
        block,
        O,
        I,
        FORMAT,
        BITS,
        SCALE_GROUP,
        GATED,
        BLOCK_O,
        COLUMNS,
    )
    column = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + source[:, None] * I + column[None, :]
    out = block * BLOCK_O + tl.arange(0, BLOCK_O)
    out_ptrs = out_ptr + target[None, :] * O + out[:, None]
    stored = inside[None, :] & (out < O)[:, None]
    if MAP == NO_MAP:
        if EARLY > 0 and PDL:
            start = tl.program_id(2) * rounds * WIDE
            _prefetch_bytes(weight_ptr, out, start, tl.minimum(start + EARLY * WIDE, I), O, I, PDL)
            if GATED:
                _prefetch_bytes(
                    weight_ptr + to_up, out, start, tl.minimum(start + EARLY * WIDE, I), O, I, PDL
                )
        wait_for_inputs(PDL)

    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    first = 0
    if SPLITS > 1:
        first = tl.program_id(2) % SPLITS * rounds * WIDE
    for start in range(first, tl.minimum(first + rounds * WIDE, I), WIDE):
        part, up_part = sums, up_sums
        if BY_GROUP:
            part = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            up_part = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for i in tl.static_range(STEPS):
            at = start + i * COLUMNS
            in_depth = at + column < I
            x = rows_of_step(x_ptrs, at, inside, in_depth, FORMAT, EVEN)
            if FORMAT == TILED and not EVEN:
                at = tl.minimum(at, (I - 1) // COLUMNS * COLUMNS)
            # One expression where all steps of a round are in one group, so that it is loaded once.
            group = 0
            if FORMAT == TILED:
                group = start // SCALE_GROUP if SCALE_GROUP >= WIDE else at // SCALE_GROUP
            weights = weights_of_step(
                ptrs,
                scales_ptrs,
                minima_ptrs,
                at,
                group,
                in_depth,
                I,
                FORMAT,
                BITS,
                E2M1,
                MINIMA,
                SCALE_GROUP,
                EVEN,
                x.dtype,
            )
            part = tl.dot(weights, x, part, input_precision="ieee")
            if GATED:
                weights = weights_of_step(
                    ptrs + to_up,
                    scales_ptrs + scales_to_up,
                    minima_ptrs + scales_to_up,
                    at,
                    group,
                    in_depth,
                    I,
                    FORMAT,
                    BITS,
                    E2M1,
                    MINIMA,
                    SCALE_GROUP,
                    EVEN,
                    x.dtype,
                )
                up_part = tl.dot(weights, x, up_part, input_precision="ieee")
        if FORMAT != PLAIN and GATED:  # The wait for up's matmul is one for gate's, too.
            up_part = settled(up_part)
        elif FORMAT != PLAIN:
            part = settled(part)
        if BY_GROUP:
            group_ptrs = scales_ptrs + start // SCALE_GROUP * weight_rows
            sums += part * tl.load(group_ptrs)[:, None]
            if GATED:
                up_sums += up_part * tl.load(group_ptrs + scales_to_up)[:, None]
        else:
            sums, up_sums = part, up_part

    if SPLITS > 1 and not SUM:
        PART: tl.constexpr = BLOCK_O * BLOCK_T
        tile = rows_block * tl.cdiv(O, BLOCK_O) + block
        parts_ptr += tile.to(tl.int64) * (SPLITS * PART * (1 + GATED))
        part_ptrs = parts_ptr + (tl.arange(0, BLOCK_O) * BLOCK_T)[:, None] + tl.arange(0, BLOCK_T)[None, :]
        own = part_ptrs + tl.program_id(2) * (PART * (1 + GATED))
        # Parts are whole tiles, so that they move several numbers at a time; but a slot is one row of many.
        kept = stored if MAP == SLOTS else tl.full((BLOCK_O, BLOCK_T), True, tl.int1)
        tl.store(own, sums, mask=kept)
        if GATED:
            tl.store(own + PART, up_sums, mask=kept)
        if not arrives_last(arrived_ptr + tile, SPLITS):
            return
        sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        up_sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for split in tl.static_range(SPLITS):  # All parts are on their way at once.
            other = part_ptrs + split * (PART * (1 + GATED))
            sums += tl.load(other, mask=kept, other=0.0, cache_modifier=".cg")
            if GATED:
                up_sums += tl.load(other + PART, mask=kept, other=0.0, cache_modifier=".cg")

    if FORMAT == TILED:
        LARGER: tl.constexpr = LARGER_BF16 if x_ptr.dtype.element_ty == tl.bfloat16 else LARGER_FP16
        sums, up_sums = sums * LARGER, up_sums * LARGER
    if SCALED and not BY_GROUP:
        sums *= tl.load(scales_ptrs)[:, None]
        if GATED:
            up_sums *= tl.load(scales_ptrs + scales_to_up)[:, None]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * ((1 + GATED) * O) + out
        biased = out < O
        if SUM and SPLITS > 1:
            biased = biased & (tl.program_id(2) % SPLITS == 0)
        sums += tl.load(bias_ptrs, mask=biased, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(bias_ptrs + O, mask=biased, other=0.0).to(tl.float32)[:, None]
    result = sums.to(DTYPE)  # Gate and up are rounded first, as two matmuls would round them.
    if GATED:
        up = up_sums.to(DTYPE).to(tl.float32)
        result = gate_with_up(result.to(tl.float32), up, ACTIVATION, ALPHA, LIMIT).to(DTYPE)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(result.to(tl.float32), 0.0)
        result = (positive * positive).to(DTYPE)

    if SUM:
        # The first row of the block is the slot; the others are padding.
        line = tl.sum(tl.where(inside[None, :], sums, 0.0), axis=1)
        tile = rows_block * tl.cdiv(O, BLOCK_O) + block
        part_ptrs = parts_ptr + tile * (K * SPLITS * BLOCK_O) + tl.arange(0, BLOCK_O)
        tl.store(part_ptrs + tl.program_id(2) * BLOCK_O, line)
        if not arrives_last(arrived_ptr + tile, K * SPLITS):
            return
        line = tl.zeros((BLOCK_O,), tl.float32)
        for part in tl.static_range(K * SPLITS):
            share = tl.load(shares_ptr + rows_block * K + part // SPLITS)
            line += share * tl.load(part_ptrs + part * BLOCK_O, cache_modifier=".cg")
        result = line.to(DTYPE)[:, None]
        out_ptrs = out_ptr + rows_block.to(tl.int64) * O + out[:, None]
        stored = (out < O)[:, None]
    if ADD:
        before = tl.load(out_ptrs, mask=stored, other=0.0)
        result = (before.to(tl.float32) + result.to(tl.float32)).to(DTYPE)
    tl.store(out_ptrs, result, mask=stored)


class RowMap(NamedTuple):
    """The rows of a map: `kind` LISTED, with the list's tiles as `map` and its slots, or SLOTS, with the
    slots' experts as `map`. `shares`: the slots' weights, by which the slots of a token are added."""

    kind: tl.constexpr
    map: torch.Tensor
    num_blocks: int  # tiles, slots, or tokens whose slots are added
    top_k: int
    num_experts: int
    slots: torch.Tensor | None = None
    shares: torch.Tensor | None = None


def weight_shape(weight: Weight) -> tuple[int, int]:
    """All rows of a weight, those of all experts, and its inputs."""
    if isinstance(weight, TiledWeight):
        return weight.shape
    matrix = weight.data if isinstance(weight, Fp8Matrix) else weight
    return matrix.shape[:-1].numel(), matrix.shape[-1]


def tile_matmul(
    tiles: RowTiles,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation | None = None,
    add: bool = False,
    rows: RowMap | None = None,
) -> None:
    """out = x @ weight^T + bias, cut as `tiles` say, or with an activation what that makes of both halves of
    the outputs, or of all if it has no gate. `add`: it is added to `out`. `rows`: as the map says."""
    (weight_rows, inputs), outs = weight_shape(weight), out.shape[1]
    gated = activation is not None and activation.has_gate
    num_experts = 1 if rows is None else rows.num_experts
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype
    assert (weight_rows, inputs) == (num_experts * outs * (1 + gated), x.shape[1])
    assert bias is None or (bias.is_contiguous() and bias.numel() == weight_rows)
    scales, minima, bits, group, e2m1 = out, None, 16, 0, False
    numbers, columns, kind = weight, tiles.columns, PLAIN
    if isinstance(weight, TiledWeight):
        assert weight.dtype == x.dtype and (outs % 16 == 0 or (num_experts == 1 and not gated))
        numbers, scales, minima, kind = weight.words, weight.scales, weight.minima, TILED
        bits, group, e2m1 = weight.bits, weight.group, weight.e2m1
        columns = 256 // bits
    elif isinstance(weight, Fp8Matrix):
        numbers, scales, group = weight
        bits = 8
        if x.itemsize == 2 and tiles.columns % FP8_STEP == inputs % tiles.columns == outs % 16 == 0:
            numbers, columns, kind = numbers.view(torch.int32), FP8_STEP, FP8
    assert tiles.columns % columns == 0
    blocks = cdiv(outs, tiles.outs)
    if rows is None:
        grid = cdiv(len(x), tiles.rows), blocks, tiles.splits
    else:
        grid = blocks, rows.num_blocks, tiles.splits * (1 if rows.shares is None else rows.top_k)
    parts, arrived = out, out
    adds_slots = rows is not None and rows.shares is not None
    if adds_slots or tiles.splits > 1:
        assert grid[0] * grid[1] <= MAX_SPLIT_TILES
        size = tiles.outs * (1 if adds_slots else tiles.rows * (1 + gated))
        parts = x.new_empty(grid[0] * grid[1] * grid[2] * size, dtype=torch.float32)
        arrived = arrival_counters("tile_matmul", MAX_SPLIT_TILES, x.device)
    stage_bytes = tiles.columns * (tiles.rows * x.itemsize + tiles.outs * (1 + gated) * bits // 8)
    tile_kernel[grid](
        x,
        numbers,
        scales,
        minima,
        bias,
        out,
        None if rows is None else rows.map,
        None if rows is None else rows.slots,
        None if rows is None else rows.shares,
        parts,
        arrived,
        outs,
        inputs,
        len(x),
        weight_rows,
        cdiv(cdiv(inputs, tiles.columns), tiles.splits),
        FORMAT=kind,
        BITS=bits,
        E2M1=e2m1,
        SCALE_GROUP=group,
        SCALED=isinstance(weight, Fp8Matrix),
        MAP=NO_MAP if rows is None else rows.kind,
        K=1 if rows is None else rows.top_k,
        GATHERS=activation is not None,
        GATED=gated,
        ACTIVATION=activation.kind if activation else "",
        ALPHA=activation.alpha if activation else 0.0,
        LIMIT=activation.limit if activation else 0.0,
        ADD=add,
        EVEN=inputs % tiles.columns == 0,
        SPLITS=tiles.splits,
        BLOCK_T=tiles.rows,
        BLOCK_O=tiles.outs,
        COLUMNS=columns,
        STEPS=tiles.columns // columns,
        EARLY=tiles.early if kind is FP8 and rows is None else 0,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, stage_bytes, x.device),
        **pdl_options(),
    )


def tile_linear(
    tiles: RowTiles,
    x_TI: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_TO` in place, if there is one, which is then returned. Bits do not depend on timing."""
    out_TO = residual_TO
    if out_TO is None:
        out_TO = empty_matmul_input(x_TI, len(x_TI), weight_shape(weight)[0] // (1 + gated))
    assert out_TO.shape[0] == len(x_TI)
    tile_matmul(tiles, x_TI, weight, bias, out_TO, Activation() if gated else None, residual_TO is not None)
    return out_TO
