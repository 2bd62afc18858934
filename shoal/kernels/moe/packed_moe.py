"""Matmuls of a mixture's experts with weights that stay in fewer bits, in Triton.

All rows of all experts are one packed matrix, expert after expert: of 4 or 8 bits as gpu_weight.py lays it,
or in fp8. A program multiplies one tile of moe.py's list, rows of one expert, with some of that expert's
outputs. Weights are read packed and become the activations' type in registers, as in packed_linear.py and
fp8_linear.py, whose steps these are. They are the tensor cores' left operand, so sums are [outputs, rows].

GATED: an expert's rows are gate over up; the rows of tokens are gathered, and silu(gate) * up is written in
the list's order. Otherwise rows come in that order, and results are scattered to the slots.

I inputs · O outputs of an expert (F of a gated matmul, which has 2F rows). The oracle is the matmul with
the unpacked matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.matmul.dispatch import Fp8Tiles, PackedTiles, choose_expert_tiles, choose_fp8_expert_tiles
from shoal.kernels.matmul.fp8_linear import Fp8Matrix, operand, operand_order
from shoal.kernels.matmul.gpu_fp8 import Fp8Weight
from shoal.kernels.matmul.linear import epilogue, fitting_stages
from shoal.kernels.matmul.packed_linear import LARGER_BF16, LARGER_FP16, TiledWeight, add_step
from shoal.kernels.rounding import cdiv

PackedExperts = TiledWeight | Fp8Weight  # the rows of all experts


@triton.jit
def _rows_of(slots_ptr, tiles_ptr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns for each row of this program's tile its source, its destination and a mask."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    row = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    in_tile = row < tl.load(tile_ptr + 2)
    slot = tl.load(slots_ptr + row, mask=in_tile, other=0).to(tl.int64)
    row = row.to(tl.int64)
    if GATED:
        source, target = slot // K, row
    else:
        source, target = row, slot
    return source, target, in_tile


@triton.jit
def _tiled_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    minima_ptr,
    out_ptr,
    slots_ptr,
    tiles_ptr,
    O: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Weights of 4 or 8 bits. A step is 16 bytes of a thread: 256 / BITS inputs."""
    expert = tl.load(tiles_ptr + tl.program_id(1) * 3).to(tl.int64)
    if expert < 0:
        return
    source, target, in_tile = _rows_of(slots_ptr, tiles_ptr, K, GATED, BLOCK_M)
    MINIMA: tl.constexpr = minima_ptr is not None
    COLUMNS: tl.constexpr = 256 // BITS
    TILES: tl.constexpr = BLOCK_O // 16
    ALL_STEPS: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    SCALE_GROUPS: tl.constexpr = (
        (I + SCALE_GROUP - 1) // SCALE_GROUP
        if SCALE_GROUP >= COLUMNS
        else ALL_STEPS * (COLUMNS // SCALE_GROUP)
    )
    EVEN: tl.constexpr = I % (STEPS * COLUMNS) == 0
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    # Tiles beyond the expert's last one are the last one again, and are not stored.
    tile = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), O // 16 - 1)
    tile += expert * ((1 + GATED) * (O // 16))
    lane = tl.arange(0, 32)
    words_ptrs = (
        words_ptr
        + (tile * (ALL_STEPS * 128))[:, None, None]
        + lane[None, :, None] * 4
        + tl.arange(0, 4)[None, None, :]
    )
    at_scales = (tile * (SCALE_GROUPS * 8))[:, None] + lane[None, :] // 4
    scales_ptrs = scales_ptr + at_scales
    minima_ptrs = scales_ptrs
    if MINIMA:
        minima_ptrs = minima_ptr + at_scales
    column = tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + source[:, None] * I + column[None, :]

    sums = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for start in range(0, ALL_STEPS, STEPS):
        for i in tl.static_range(STEPS):
            step = start + i
            in_x = in_tile[:, None]
            if not EVEN:
                in_x = in_x & (step * COLUMNS + column < I)[None, :]
                step = tl.minimum(step, ALL_STEPS - 1)  # Whatever is read there meets zeros.
            x = tl.load(x_ptrs + (start + i) * COLUMNS, mask=in_x, other=0.0)
            # One expression where all steps of a round are in one group, so that it is loaded once.
            group = (
                start * COLUMNS // SCALE_GROUP
                if SCALE_GROUP >= STEPS * COLUMNS
                else step * COLUMNS // SCALE_GROUP
            )
            sums = add_step(
                x, words_ptrs, scales_ptrs, minima_ptrs, step, group, sums, BITS, E2M1, MINIMA, SCALE_GROUP
            )
            if GATED:
                up_sums = add_step(
                    x,
                    words_ptrs + O // 16 * ALL_STEPS * 128,
                    scales_ptrs + O // 16 * SCALE_GROUPS * 8,
                    minima_ptrs + O // 16 * SCALE_GROUPS * 8,
                    step,
                    group,
                    up_sums,
                    BITS,
                    E2M1,
                    MINIMA,
                    SCALE_GROUP,
                )
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    LARGER: tl.constexpr = LARGER_BF16 if tl.bfloat16 == DTYPE else LARGER_FP16
    result = epilogue(sums * LARGER, up_sums * LARGER, None, out[:, None], O, DTYPE, GATED)
    tl.store(out_ptr + target[None, :] * O + out[:, None], result, mask=in_tile[None, :] & (out < O)[:, None])


@triton.jit
def _fp8_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    slots_ptr,
    tiles_ptr,
    O: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    GATED: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Weights in fp8. The scales of outputs are applied to the sums at the end, scales of groups to each
    group's sum. TILED: weights are read as `operand` says, for which all tiles of 16 outputs and BLOCK_I
    inputs are whole and `weight_ptr` is of int32."""
    expert = tl.load(tiles_ptr + tl.program_id(1) * 3).to(tl.int64)
    if expert < 0:
        return
    source, target, in_tile = _rows_of(slots_ptr, tiles_ptr, K, GATED, BLOCK_M)
    ROWS: tl.constexpr = (1 + GATED) * O  # rows of one expert
    EVEN: tl.constexpr = I % BLOCK_I == 0
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_I)
    scales_ptrs = scales_ptr + expert * ROWS + out
    if TILED:
        lane = tl.arange(0, 32)[None, :, None]
        tile = tl.program_id(0) * (BLOCK_O // 16) + tl.arange(0, BLOCK_O // 16)
        first = expert * ROWS + tl.minimum(tile, O // 16 - 1) * 16  # as in `_tiled_kernel`
        low_ptrs = weight_ptr + (first[:, None, None] + lane // 4) * (I // 4)
        low_ptrs += lane % 4 * 4 + tl.arange(0, 4)[None, None, :]
        x_ptrs = x_ptr + source[:, None] * I + tl.arange(0, 64)[None, :]
    else:
        weight_ptrs = weight_ptr + (expert * ROWS + out)[:, None] * I + column[None, :]
        x_ptrs = x_ptr + source[None, :] * I + column[:, None]

    sums = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for start in range(0, I, BLOCK_I):
        if SCALE_GROUP > 0:
            part = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
            up_part = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
        else:
            part, up_part = sums, up_sums
        if TILED:
            for at in tl.static_range(0, BLOCK_I, 64):
                x = operand_order(tl.load(x_ptrs + start + at, mask=in_tile[:, None], other=0.0))
                ptrs = low_ptrs + (start + at) // 4
                part = tl.dot(operand(ptrs, ptrs + 2 * I, x.dtype), x, part)
                if GATED:
                    ptrs += O * (I // 4)
                    up_part = tl.dot(operand(ptrs, ptrs + 2 * I, x.dtype), x, up_part)
        else:
            in_x, in_weight = in_tile[None, :], (out < O)[:, None]
            if not EVEN:
                in_x = in_x & (start + column < I)[:, None]
                in_weight = in_weight & (start + column < I)[None, :]
            x = tl.load(x_ptrs + start, mask=in_x, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=in_weight, other=0.0).to(x.dtype)
            part = tl.dot(weight, x, part, input_precision="ieee")
            if GATED:
                up_weight = tl.load(weight_ptrs + O * I + start, mask=in_weight, other=0.0).to(x.dtype)
                up_part = tl.dot(up_weight, x, up_part, input_precision="ieee")
        if SCALE_GROUP > 0:
            group_ptrs = scales_ptrs + start // SCALE_GROUP * (E * ROWS)
            sums += part * tl.load(group_ptrs, mask=out < O, other=0.0)[:, None]
            if GATED:
                up_sums += up_part * tl.load(group_ptrs + O, mask=out < O, other=0.0)[:, None]
        else:
            sums, up_sums = part, up_part
    if SCALE_GROUP == 0:
        sums *= tl.load(scales_ptrs, mask=out < O, other=0.0)[:, None]
        if GATED:
            up_sums *= tl.load(scales_ptrs + O, mask=out < O, other=0.0)[:, None]
    result = epilogue(sums, up_sums, None, out[:, None], O, out_ptr.dtype.element_ty, GATED)
    tl.store(out_ptr + target[None, :] * O + out[:, None], result, mask=in_tile[None, :] & (out < O)[:, None])


def packed_shape(weight: PackedExperts, num_experts: int) -> tuple[int, int, int]:
    """[experts, rows of one, inputs]"""
    rows, inputs = weight.matrix.data.shape if isinstance(weight, Fp8Weight) else weight.shape
    assert rows % num_experts == 0
    return num_experts, rows // num_experts, inputs


def packed_matmul(
    x: torch.Tensor,
    weight: PackedExperts,
    out: torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    num_experts: int,
    top_k: int,
    block_rows: int,
    gated: bool,
) -> None:
    """Writes to `out` the matmul of the listed rows, tile by tile of `block_rows`, with the expert of each
    tile."""
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype == weight.dtype
    assert packed_shape(weight, num_experts) == (num_experts, out.shape[1] * (1 + gated), x.shape[1])
    if isinstance(weight, Fp8Weight):
        cut = choose_fp8_expert_tiles(block_rows, weight.matrix.group)
        _fp8_matmul(cut, x, weight.matrix, out, slots, tiles, num_experts, top_k, gated)
    else:
        _tiled_matmul(choose_expert_tiles(block_rows, gated), x, weight, out, slots, tiles, top_k, gated)


def _tiled_matmul(
    cut: PackedTiles,
    x: torch.Tensor,
    weight: TiledWeight,
    out: torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    top_k: int,
    gated: bool,
) -> None:
    outs, inputs = out.shape[1], x.shape[1]
    assert outs % 16 == 0
    stage_bytes = (cut.rows * 2 + cut.outs * (1 + gated)) * 256 // weight.bits * cut.steps
    _tiled_kernel[(cdiv(outs, cut.outs), len(tiles))](
        x,
        weight.words,
        weight.scales,
        weight.minima,
        out,
        slots,
        tiles,
        O=outs,
        I=inputs,
        K=top_k,
        BITS=weight.bits,
        E2M1=weight.e2m1,
        SCALE_GROUP=weight.group,
        GATED=gated,
        BLOCK_M=cut.rows,
        BLOCK_O=cut.outs,
        STEPS=cut.steps,
        num_warps=cut.outs // 16,
        num_stages=fitting_stages(cut.num_stages, stage_bytes, x.device),
    )


def _fp8_matmul(
    cut: Fp8Tiles,
    x: torch.Tensor,
    matrix: Fp8Matrix,
    out: torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    num_experts: int,
    top_k: int,
    gated: bool,
) -> None:
    outs, inputs = out.shape[1], x.shape[1]
    whole = cut.columns % 64 == inputs % cut.columns == outs % 16 == 0
    tiled = whole and x.itemsize == 2
    stage_bytes = cut.columns * (cut.outs * (1 + gated) + cut.rows * x.itemsize)
    _fp8_kernel[(cdiv(outs, cut.outs), len(tiles))](
        x,
        matrix.data.view(torch.int32) if tiled else matrix.data,
        matrix.scales,
        out,
        slots,
        tiles,
        O=outs,
        I=inputs,
        K=top_k,
        E=num_experts,
        SCALE_GROUP=matrix.group,
        GATED=gated,
        TILED=tiled,
        BLOCK_M=cut.rows,
        BLOCK_O=cut.outs,
        BLOCK_I=cut.columns,
        num_warps=cut.num_warps,
        num_stages=fitting_stages(cut.num_stages, stage_bytes, x.device),
    )
