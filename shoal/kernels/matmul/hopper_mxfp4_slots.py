"""Experts of few tokens with weights in MXFP4 on Hopper, in Gluon: each slot, a pair of a token and one of
its K choices, is multiplied as a row of its own.

A weight is read once and multiplied with one row, so what a weight costs in instructions and waits decides. A
thread reads 16 bytes of a packed tile, which are the left operand of four `mma.m16n8k16` (gpu_weight.py), and
widens them in registers; of the 8 columns of the right operand one is the row, the others are 0. A warp has
every n-th step of 64 inputs of a tile of 16 outputs; the sums of a program's warps are added in fixed order.
No other program has a part of the sum, so none waits for another one.

The first matmul has a program for each slot and tile of 16 outputs, gate and up. The second one has a program
for each token and tile, whose warps are divided among the token's K slots, and adds these by weight. It
starts once the experts are known, while the first one runs, and has its first weights before it waits.

I inputs · O outputs (F of a gated matmul, whose weight has 2F rows an expert). The oracle: moe/reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shoal.kernels.matmul.hopper_linear import gate_mul, squared_relu, wait_for_inputs, wait_then_start_next
from shoal.kernels.matmul.loaders import SMALLER, TiledWeight
from shoal.kernels.matmul.mxfp4_pairs import halves, placed, scaled
from shoal.kernels.matmul.tile_matmul import RowMap, Weight
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import next_power_of_2
from shoal.kinds.experts import Activation

STEP: gl.constexpr = gl.constexpr(64)  # inputs
# Warps of a program, and rounds that are read at once.
GATE_UP, DOWN = (8, 1), (8, 4)


@gluon.jit
def _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, dtype: gl.constexpr):
    """One instruction of a warp: 16 outputs, 16 inputs, 8 columns."""
    return gl.inline_asm_elementwise(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        True,
        1,
    )


@gluon.jit
def _quarters(words, layout: gl.constexpr):
    """Four numbers of the last dimension as tensors of their own."""
    a, b = gl.split(gl.reshape(words, (words.shape[0], words.shape[1], 2, 2)))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return (
        gl.convert_layout(a0, layout, assert_trivial=True),
        gl.convert_layout(b0, layout, assert_trivial=True),
        gl.convert_layout(a1, layout, assert_trivial=True),
        gl.convert_layout(b1, layout, assert_trivial=True),
    )


@gluon.jit
def _add_word(word, low, high, b0, b1, sums, dtype: gl.constexpr):
    c0, c1, c2, c3 = sums
    a0 = scaled(placed(word, 0, dtype), low, dtype)
    a1 = scaled(placed(word, 1, dtype), high, dtype)
    a2 = scaled(placed(word, 2, dtype), low, dtype)
    a3 = scaled(placed(word, 3, dtype), high, dtype)
    return _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, dtype)


@gluon.jit
def _add_step(words, scales, row, sums, layout: gl.constexpr, dtype: gl.constexpr):
    """Adds a step of a tile. `row`: the eight pairs of inputs of a thread."""
    w0, w1, w2, w3 = _quarters(words, layout)
    first, second = gl.split(scales)
    first = gl.convert_layout(first, layout, assert_trivial=True)
    second = gl.convert_layout(second, layout, assert_trivial=True)
    low, high = halves(first)
    sums = _add_word(w0, low, high, row[0], row[1], sums, dtype)
    sums = _add_word(w1, low, high, row[2], row[3], sums, dtype)
    low, high = halves(second)
    sums = _add_word(w2, low, high, row[4], row[5], sums, dtype)
    return _add_word(w3, low, high, row[6], row[7], sums, dtype)


@gluon.jit
def _load_rounds(
    ptrs,
    step,
    start,
    to_up,
    steps,
    STRIDE: gl.constexpr,
    PARTS: gl.constexpr,
    ROUNDS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Words or scales of ROUNDS rounds: of each one gate's and up's, or the only one's."""
    found = ()
    for i in gl.static_range(ROUNDS):
        at = (start + i) * PARTS
        exists = step + at < steps
        found = found + (gl.load(ptrs + at * STRIDE, mask=exists, other=0),)  # type: ignore
        if GATED:
            found = found + (gl.load(ptrs + to_up + at * STRIDE, mask=exists, other=0),)  # type: ignore
    return found


@gluon.jit
def _slot(warp, rows, K: gl.constexpr, PARTS: gl.constexpr, SUM: gl.constexpr):
    """The slot of a warp. Warps beyond a token's K slots have its last one again, with no share."""
    if SUM:
        place = warp // PARTS
        slot = rows * K + gl.where(place < K, place, K - 1)
    else:
        slot = rows + warp * 0
    return slot


@gluon.jit
def _keep_order():
    """Keeps the compiler from moving loads to the place where their numbers are needed."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def hopper_mxfp4_slots_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    experts_ptr,
    shares_ptr,
    outs,
    inputs,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    LARGER: gl.constexpr,
    ADD: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,
    ROUNDS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program has PARTS warps for each of its slots. A round is a step of each warp, and ROUNDS rounds are
    read at once. `x_ptr`: pairs of inputs, as int32."""
    SUM: gl.constexpr = shares_ptr is not None
    dtype: gl.constexpr = "bf16" if out_ptr.dtype.element_ty == gl.bfloat16 else "f16"
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    in_words: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    in_scales: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    words_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, in_words)))
    words_lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, in_words)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, in_words)))
    scales_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, in_scales)))
    scales_lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, in_scales)))
    group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, in_scales)))
    warp, lane = gl.arange(0, WARPS, gl.SliceLayout(1, layout)), gl.arange(0, 32, gl.SliceLayout(0, layout))
    tile, rows = gl.program_id(0), gl.program_id(1)
    steps = inputs // STEP
    if not SUM:
        wait_then_start_next(PDL)
    slot = _slot(warp, rows, K, PARTS, SUM)
    words_slot = _slot(words_warp, rows, K, PARTS, SUM)
    scales_slot = _slot(scales_warp, rows, K, PARTS, SUM)
    row = slot if SUM else slot // K
    tiles = outs // 16
    expert = gl.load(experts_ptr + words_slot, cache_modifier=".cg").to(gl.int64)
    first_tile = expert * ((1 + GATED) * tiles) + tile
    words_ptrs = words_ptr + (first_tile * (steps * 128) + words_warp % PARTS * 128)[:, None, None]
    words_ptrs += words_lane[None, :, None] * 4 + word[None, None, :]
    expert = gl.load(experts_ptr + scales_slot, cache_modifier=".cg").to(gl.int64)
    first_tile = expert * ((1 + GATED) * tiles) + tile
    scales_ptrs = scales_ptr + (first_tile * (steps * 16) + scales_warp % PARTS * 16)[:, None, None]
    scales_ptrs += scales_lane[None, :, None] // 4 + group[None, None, :] * 8
    words_step = (words_warp % PARTS)[:, None, None] + words_lane[None, :, None] * 0 + word[None, None, :] * 0
    scales_step = (
        (scales_warp % PARTS)[:, None, None] + scales_lane[None, :, None] * 0 + group[None, None, :] * 0
    )
    step = (warp % PARTS)[:, None] + lane[None, :] * 0
    x_ptrs = x_ptr + (row * (inputs // 2) + warp % PARTS * 32)[:, None] + (lane % 4)[None, :]
    in_column = (lane < 4)[None, :]
    zeros = gl.zeros([WARPS, 32], gl.float32, layout)
    sums = (zeros, zeros, zeros, zeros)
    up_sums = (zeros, zeros, zeros, zeros)
    to_up = tiles.to(gl.int64) * steps
    words = _load_rounds(words_ptrs, words_step, 0, to_up * 128, steps, 128, PARTS, ROUNDS, GATED)
    scales = _load_rounds(scales_ptrs, scales_step, 0, to_up * 16, steps, 16, PARTS, ROUNDS, GATED)
    if SUM:
        _keep_order()
        wait_for_inputs(PDL)
    for start in range(0, gl.cdiv(steps, PARTS), ROUNDS):
        # The next rounds are on their way while these are multiplied.
        ahead = start + ROUNDS
        next_words = _load_rounds(
            words_ptrs, words_step, ahead, to_up * 128, steps, 128, PARTS, ROUNDS, GATED
        )
        next_scales = _load_rounds(
            scales_ptrs, scales_step, ahead, to_up * 16, steps, 16, PARTS, ROUNDS, GATED
        )
        _keep_order()
        for i in gl.static_range(ROUNDS):
            at = (start + i) * PARTS
            inside = in_column & (step + at < steps)
            pairs = ()
            for j in gl.static_range(8):
                pairs = pairs + (gl.load(x_ptrs + (at * 32 + j * 4), mask=inside, other=0),)  # type: ignore
            sums = _add_step(words[i * (1 + GATED)], scales[i * (1 + GATED)], pairs, sums, layout, dtype)
            if GATED:
                up_sums = _add_step(words[2 * i + 1], scales[2 * i + 1], pairs, up_sums, layout, dtype)
        words, scales = next_words, next_scales
    # Lane 4 g has outputs g and g + 8 in its first and third sum.
    tops, bottoms = sums[0] * LARGER, sums[2] * LARGER
    out = tile * 16 + lane // 4
    stored = lane % 4 == 0
    if SUM:
        share = gl.load(shares_ptr + slot, mask=warp // PARTS < K, other=0.0)[:, None]
        if bias_ptr is not None:
            biased = (warp % PARTS == 0)[:, None] & stored[None, :]
            bias_ptrs = bias_ptr + (gl.load(experts_ptr + slot) * outs)[:, None] + out[None, :]
            tops += gl.load(bias_ptrs, mask=biased, other=0.0).to(gl.float32)
            bottoms += gl.load(bias_ptrs + 8, mask=biased, other=0.0).to(gl.float32)
        tops, bottoms = tops * share, bottoms * share
    top, bottom = gl.sum(tops, axis=0), gl.sum(bottoms, axis=0)
    element: gl.constexpr = out_ptr.dtype.element_ty
    out_ptrs = out_ptr + rows.to(gl.int64) * outs + out
    if not SUM and bias_ptr is not None:
        bias_ptrs = bias_ptr + gl.load(experts_ptr + rows) * ((1 + GATED) * outs) + out
        top += gl.load(bias_ptrs).to(gl.float32)
        bottom += gl.load(bias_ptrs + 8).to(gl.float32)
    if GATED:
        up_top, up_bottom = gl.sum(up_sums[0] * LARGER, axis=0), gl.sum(up_sums[2] * LARGER, axis=0)
        if bias_ptr is not None:
            up_top += gl.load(bias_ptrs + outs).to(gl.float32)
            up_bottom += gl.load(bias_ptrs + outs + 8).to(gl.float32)
        top = gate_mul(top, up_top, ACTIVATION, element, ALPHA, LIMIT)
        bottom = gate_mul(bottom, up_bottom, ACTIVATION, element, ALPHA, LIMIT)
    else:
        top, bottom = top.to(element), bottom.to(element)
        if ACTIVATION == "relu2":
            top, bottom = squared_relu(top), squared_relu(bottom)
    if ADD:
        top = (gl.load(out_ptrs, mask=stored, other=0.0).to(gl.float32) + top.to(gl.float32)).to(element)
        bottom = (gl.load(out_ptrs + 8, mask=stored, other=0.0).to(gl.float32) + bottom.to(gl.float32)).to(
            element
        )
    gl.store(out_ptrs, top, mask=stored)
    gl.store(out_ptrs + 8, bottom, mask=stored)


def mxfp4_slots_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias_EO: torch.Tensor | None,
    out: torch.Tensor,
    rows: RowMap,
    activation: Activation | None = None,
    add: bool = False,
) -> None:
    """The matmul of SLOTS. With an activation it is the first one; otherwise the second one, which adds a
    token's slots by weight, and to `out` with `add`. Bits do not depend on timing."""
    inputs, outs = x.shape[1], out.shape[1]
    gated = activation is not None and activation.has_gate
    assert isinstance(weight, TiledWeight)
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == weight.dtype
    assert weight.e2m1 and weight.group == 32 and weight.minima is None
    assert weight.shape == (rows.num_experts * outs * (1 + gated), inputs)
    assert outs % 16 == inputs % STEP.value == 0 and (activation is None) == (rows.shares is not None)
    if activation is None:
        slots = next_power_of_2(rows.top_k)
        warps, rounds = DOWN
        parts = max(1, warps // slots)
        warps = slots * parts
    else:
        warps, rounds = GATE_UP
        parts = warps
    hopper_mxfp4_slots_kernel[(outs // 16, rows.num_blocks)](
        x.view(torch.int32),
        weight.words,
        weight.scales,
        bias_EO,
        out,
        rows.map,
        rows.shares,
        outs,
        inputs,
        K=rows.top_k,
        GATED=gated,
        ACTIVATION=activation.kind if activation else "",
        ALPHA=activation.alpha if activation else 1.0,
        LIMIT=activation.limit if activation else 0.0,
        LARGER=2.0 ** SMALLER[x.dtype],
        ADD=add,
        WARPS=warps,
        PARTS=parts,
        ROUNDS=rounds,
        num_warps=warps,
        **pdl_options(),
    )
