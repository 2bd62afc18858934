"""Experts of few tokens with weights in MXFP4 on Hopper, in Gluon: each slot, a pair of a token and one of
its K choices, is multiplied as a row of its own.

A weight is read once and multiplied with one row, so what a weight costs in instructions and waits decides. A
thread reads 16 bytes of a tile, which are the left operand of four `mma.m16n8k16` (mxfp4_experts.py), and
widens them in registers; of the 8 columns of the right operand one is the row, the others are 0. A warp has
every n-th step of 64 inputs of 16 outputs: of two tiles of gate and up, or of one other tile. The sums of a
program's warps are added in fixed order. No other program has a part of the sum, so none waits for another.

The first matmul has a program for each slot and 16 outputs. The second one has a program for each token and
16 outputs, whose warps are divided among the token's K slots, and adds these by weight. It
starts once the experts are known, while the first one runs, and has its first weights before it waits.

I inputs · O outputs (F of a gated matmul, whose weight has 2F rows an expert). The oracle: moe/reference.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shoal.kernels.matmul.hopper_linear import gate_mul, squared_relu, wait_for_inputs, wait_then_start_next
from shoal.kernels.matmul.loaders import SMALLER
from shoal.kernels.matmul.mxfp4_experts import ExpertRuns
from shoal.kernels.matmul.tile_matmul import RowMap
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import next_power_of_2
from shoal.kinds.experts import Activation

STEP: gl.constexpr = gl.constexpr(64)  # inputs
STEP_WORDS: gl.constexpr = gl.constexpr(544)  # int32; a strip has 4 tiles, then 32 words with scales
TILE_WORDS: gl.constexpr = gl.constexpr(128)
# Warps of a program, and rounds that are read at once.
GATE_UP, DOWN = (8, 1), (8, 4)


@gluon.jit
def _placed(words, PAIR: gl.constexpr):
    """Returns a pair of weights of each word, an int32, with sign, exponent and mantissa where bf16 has them,
    before they are scaled."""
    SIGN: gl.constexpr = -0x7FFF8000
    REST: gl.constexpr = 0x01C001C0
    if PAIR == 0:
        pair = words & (SIGN | REST)
    elif PAIR == 1:
        pair = (words << 3) & (SIGN | REST)
    elif PAIR == 2:
        pair = ((words << 1) & SIGN) | ((words << 6) & REST)
    else:
        pair = ((words << 2) & SIGN) | ((words >> 3) & REST)
    return pair


@gluon.jit
def _powers(scales, BYTE: gl.constexpr):
    """Returns a byte of each int32, an exponent, as a pair of powers of two in bf16."""
    ORDER: gl.constexpr = 0x4040 + BYTE * 0x101
    pair = gl.inline_asm_elementwise(f"prmt.b32 $0, $1, 0, {ORDER};", "=r,r", [scales], gl.int32, True, 1)
    return pair << 7


@gluon.jit
def _scaled(pairs, scales):
    """Returns the products of pairs with pairs of scales."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, scales], gl.int32, True, 1
    )


@gluon.jit
def _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """One instruction of a warp: 16 weight rows, 16 inputs, 8 columns."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
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
def _add_word(word, low, high, b0, b1, sums):
    c0, c1, c2, c3 = sums
    a0, a1 = _scaled(_placed(word, 0), low), _scaled(_placed(word, 1), high)
    a2, a3 = _scaled(_placed(word, 2), low), _scaled(_placed(word, 3), high)
    return _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3)


@gluon.jit
def _add_step(words, scales, row, sums, layout: gl.constexpr):
    """Adds a step of a tile. `row`: the eight pairs of inputs of a thread."""
    w0, w1, w2, w3 = _quarters(words, layout)
    low, high = _powers(scales, 0), _powers(scales, 1)
    sums = _add_word(w0, low, high, row[0], row[1], sums)
    sums = _add_word(w1, low, high, row[2], row[3], sums)
    low, high = _powers(scales, 2), _powers(scales, 3)
    sums = _add_word(w2, low, high, row[4], row[5], sums)
    return _add_word(w3, low, high, row[6], row[7], sums)


@gluon.jit
def _load_rounds(
    ptrs,
    step,
    start,
    steps,
    TO_SECOND: gl.constexpr,
    PARTS: gl.constexpr,
    ROUNDS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Words or scales of ROUNDS rounds: of each one both tiles', or the only one's."""
    found = ()
    for i in gl.static_range(ROUNDS):
        at = (start + i) * PARTS
        exists = step + at < steps
        found = found + (gl.load(ptrs + at * STEP_WORDS, mask=exists, other=0),)  # type: ignore
        if GATED:
            found = found + (gl.load(ptrs + (TO_SECOND + at * STEP_WORDS), mask=exists, other=0),)  # type: ignore
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
    runs_ptr,
    bias_ptr,
    out_ptr,
    experts_ptr,
    shares_ptr,
    outs,
    inputs,
    run_steps,
    K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    LARGER: gl.constexpr,
    ADD: gl.constexpr,
    EVEN: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,
    ROUNDS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program has PARTS warps for each of its slots. A round is a step of each warp, and ROUNDS rounds are
    read at once. `x_ptr`: pairs of inputs, as int32. `run_steps`: steps of a strip in memory. EVEN: the
    inputs are whole steps."""
    SUM: gl.constexpr = shares_ptr is not None
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    in_words: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    words_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, in_words)))
    words_lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, in_words)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, in_words)))
    warp, lane = gl.arange(0, WARPS, gl.SliceLayout(1, layout)), gl.arange(0, 32, gl.SliceLayout(0, layout))
    block, rows = gl.program_id(0), gl.program_id(1)
    steps = gl.cdiv(inputs, STEP)
    if not SUM:
        wait_then_start_next(PDL)
    slot = _slot(warp, rows, K, PARTS, SUM)
    words_slot = _slot(words_warp, rows, K, PARTS, SUM)
    row = slot if SUM else slot // K
    first_tile = block * (1 + GATED)
    strips = outs * (1 + GATED) // 64
    tile, step_words = first_tile % 4, run_steps * STEP_WORDS
    expert = gl.load(experts_ptr + words_slot, cache_modifier=".cg").to(gl.int64)
    first_word = (expert * strips + first_tile // 4) * step_words + words_warp % PARTS * STEP_WORDS
    words_ptrs = runs_ptr + (first_word + tile * TILE_WORDS)[:, None, None]
    words_ptrs += words_lane[None, :, None] * 4 + word[None, None, :]
    expert = gl.load(experts_ptr + slot, cache_modifier=".cg").to(gl.int64)
    first_word = (expert * strips + first_tile // 4) * step_words + warp % PARTS * STEP_WORDS
    scales_ptrs = runs_ptr + (first_word + 4 * TILE_WORDS + tile * 8)[:, None] + (lane // 4)[None, :]
    words_step = (words_warp % PARTS)[:, None, None] + words_lane[None, :, None] * 0 + word[None, None, :] * 0
    step = (warp % PARTS)[:, None] + lane[None, :] * 0
    pair = (warp % PARTS * 32)[:, None] + (lane % 4)[None, :]
    x_ptrs = x_ptr + (row * (inputs // 2))[:, None] + pair
    in_column = (lane < 4)[None, :]
    zeros = gl.zeros([WARPS, 32], gl.float32, layout)
    sums = (zeros, zeros, zeros, zeros)
    second_sums = (zeros, zeros, zeros, zeros)
    words = _load_rounds(words_ptrs, words_step, 0, steps, TILE_WORDS, PARTS, ROUNDS, GATED)
    scales = _load_rounds(scales_ptrs, step, 0, steps, 8, PARTS, ROUNDS, GATED)
    if SUM:
        _keep_order()
        wait_for_inputs(PDL)
    for start in range(0, gl.cdiv(steps, PARTS), ROUNDS):
        # The next rounds are on their way while these are multiplied.
        ahead = start + ROUNDS
        next_words = _load_rounds(words_ptrs, words_step, ahead, steps, TILE_WORDS, PARTS, ROUNDS, GATED)
        next_scales = _load_rounds(scales_ptrs, step, ahead, steps, 8, PARTS, ROUNDS, GATED)
        _keep_order()
        for i in gl.static_range(ROUNDS):
            at = (start + i) * PARTS
            inside = in_column & (step + at < steps)
            pairs = ()
            for j in gl.static_range(8):
                place = at * 32 + j * 4
                exists = inside if EVEN else inside & (pair + place < inputs // 2)
                pairs = pairs + (gl.load(x_ptrs + place, mask=exists, other=0),)  # type: ignore
            sums = _add_step(words[i * (1 + GATED)], scales[i * (1 + GATED)], pairs, sums, layout)
            if GATED:
                second_sums = _add_step(words[2 * i + 1], scales[2 * i + 1], pairs, second_sums, layout)
        words, scales = next_words, next_scales
    # Lane 4 g has a tile's weight rows g and g + 8 in its first and third sum: gate and up of output g, and
    # in the second tile of output g + 8; or outputs 2 g and 2 g + 1.
    tops, bottoms = sums[0] * LARGER, sums[2] * LARGER
    TO_BOTTOM: gl.constexpr = 8 if GATED else 1
    out = block * 16 + lane // 4 * (1 if GATED else 2)
    stored = lane % 4 == 0
    if SUM:
        share = gl.load(shares_ptr + slot, mask=warp // PARTS < K, other=0.0)[:, None]
        if bias_ptr is not None:
            biased = (warp % PARTS == 0)[:, None] & stored[None, :]
            bias_ptrs = bias_ptr + (gl.load(experts_ptr + slot) * outs)[:, None] + out[None, :]
            tops += gl.load(bias_ptrs, mask=biased, other=0.0).to(gl.float32)
            bottoms += gl.load(bias_ptrs + 1, mask=biased, other=0.0).to(gl.float32)
        tops, bottoms = tops * share, bottoms * share
    top, bottom = gl.sum(tops, axis=0), gl.sum(bottoms, axis=0)
    element: gl.constexpr = out_ptr.dtype.element_ty
    out_ptrs = out_ptr + rows.to(gl.int64) * outs + out
    if not SUM and bias_ptr is not None:
        bias_ptrs = bias_ptr + gl.load(experts_ptr + rows) * ((1 + GATED) * outs) + out
    if GATED:
        gate, up = top, bottom
        gate_below = gl.sum(second_sums[0] * LARGER, axis=0)
        up_below = gl.sum(second_sums[2] * LARGER, axis=0)
        if bias_ptr is not None:
            gate += gl.load(bias_ptrs).to(gl.float32)
            up += gl.load(bias_ptrs + outs).to(gl.float32)
            gate_below += gl.load(bias_ptrs + 8).to(gl.float32)
            up_below += gl.load(bias_ptrs + outs + 8).to(gl.float32)
        top = gate_mul(gate, up, ACTIVATION, element, ALPHA, LIMIT)
        bottom = gate_mul(gate_below, up_below, ACTIVATION, element, ALPHA, LIMIT)
    else:
        if not SUM and bias_ptr is not None:
            top += gl.load(bias_ptrs).to(gl.float32)
            bottom += gl.load(bias_ptrs + 1).to(gl.float32)
        top, bottom = top.to(element), bottom.to(element)
        if ACTIVATION == "relu2":
            top, bottom = squared_relu(top), squared_relu(bottom)
    below_ptrs = out_ptrs + TO_BOTTOM
    if ADD:
        top = (gl.load(out_ptrs, mask=stored, other=0.0).to(gl.float32) + top.to(gl.float32)).to(element)
        before = gl.load(below_ptrs, mask=stored, other=0.0).to(gl.float32)
        bottom = (before + bottom.to(gl.float32)).to(element)
    gl.store(out_ptrs, top, mask=stored)
    gl.store(below_ptrs, bottom, mask=stored)


def mxfp4_slots_matmul(
    x: torch.Tensor,
    weight: ExpertRuns,
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
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == torch.bfloat16
    assert weight.shape == (rows.num_experts * outs * (1 + gated), inputs)
    assert outs % 16 == inputs % 2 == 0 and (activation is None) == (rows.shares is not None)
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
        weight.runs.view(torch.int32),
        bias_EO,
        out,
        rows.map,
        rows.shares,
        outs,
        inputs,
        weight.runs.shape[2],
        K=rows.top_k,
        GATED=gated,
        ACTIVATION=activation.kind if activation else "",
        ALPHA=activation.alpha if activation else 1.0,
        LIMIT=activation.limit if activation else 0.0,
        LARGER=2.0 ** SMALLER[x.dtype],
        ADD=add,
        EVEN=inputs % STEP.value == 0,
        WARPS=warps,
        PARTS=parts,
        ROUNDS=rounds,
        num_warps=warps,
        **pdl_options(),
    )
