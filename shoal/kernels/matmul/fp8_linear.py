"""Matmuls with a weight in fp8 (e4m3), in Triton, for GPUs that know the type.

Few rows take the time of reading the weight. There activations stay as they are and each weight is widened in
registers, which e4m3 allows without rounding in bf16, float16 and float32: the results equal the
unpacked matrix's, without its bytes. One row is multiplied elementwise in float32; more go to tensor cores
with the weight as left operand. The inputs are split, so that all SMs read: the last program of a tile to
arrive adds the parts in a fixed order.

Many rows are bound by arithmetic. They come in fp8 (fp8_quantize.py), and tensor cores multiply fp8 with fp8,
whose sums are promoted to float32 every 128 inputs. Scales of rows and outputs are applied to the sums at the
end, scales of groups of inputs to the sum of each group. torch has this matmul for Hopper and bf16; the
kernel here is for other cards, types and sizes.

GATED: the weight is gate over up, and silu(gate) * up leaves the kernel. ADD: the matmul, rounded as one of
its own, is added to what the output holds, the residual. dispatch.py chooses the kernel.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows) · G groups of inputs. The
oracle is the matmul with the unpacked matrix, and of rows in fp8 with what they stand for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul
from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input
from shoal.kernels.matmul.dispatch import (
    After,
    Before,
    ElementwiseTiles,
    Kernel,
    RowTiles,
    Shape,
    choose,
    gpu_of,
)
from shoal.kernels.matmul.linear import epilogue
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.matmul.shared_memory import fitting_stages
from shoal.kernels.matmul.tile_matmul import tile_matmul
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.quant.fp8_quantize import gate_mul_fp8, quantize
from shoal.kernels.quant.fp8_tensor import Fp8Rows
from shoal.kernels.rounding import cdiv
from shoal.kinds.experts import Activation

if HAS_GLUON:
    from shoal.kernels.matmul import hopper_row

ROWS_ARE_FP8 = (Kernel.FP8_MANY, Kernel.FP8_TORCH)


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    O,
    I,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, elementwise. The first tile of the weight is on its way before the row is there."""
    WIDE: tl.constexpr = (
        SCALE_GROUP if SCALE_GROUP > 0 and SCALE_GROUP < BLOCK_I else BLOCK_I
    )  # columns of a tile with one scale
    PARTS: tl.constexpr = BLOCK_I // WIDE
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    part = tl.arange(0, PARTS)
    column = part[None, :, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    in_out = (out < O)[:, None, None]
    num_outs = O * (1 + GATED)
    weight_ptrs = weight_ptr + out.to(tl.int64)[:, None, None] * I + column
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[:, None, None] * I + column
    in_tile = in_out if EVEN else in_out & (column < I)
    weight = tl.load(weight_ptrs, mask=in_tile, other=0.0)
    if GATED:
        up_weight = tl.load(up_ptrs, mask=in_tile, other=0.0)
    wait_for_inputs(PDL)

    if ADD:
        before = tl.load(out_ptr + out, mask=out < O, other=0.0)
    sums = tl.zeros((BLOCK_O, PARTS, WIDE), tl.float32)
    up_sums = tl.zeros((BLOCK_O, PARTS, WIDE), tl.float32)
    for start in range(0, I, BLOCK_I):
        next_start = start + BLOCK_I
        x_ptrs = x_ptr + start + column
        x = (tl.load(x_ptrs) if EVEN else tl.load(x_ptrs, mask=start + column < I, other=0.0)).to(tl.float32)
        if SCALE_GROUP > 0:
            # The scale of a group is applied to its matmuls, as another group may follow in the same sums.
            group = (start + part * WIDE) // SCALE_GROUP
            inside = (out < O)[:, None] & (start + part * WIDE < I)[None, :]
            at = group[None, :] * num_outs + out[:, None]
            scale = tl.load(scales_ptr + at, mask=inside, other=0.0)
            sums += weight.to(tl.float32) * x * scale[:, :, None]
            if GATED:
                up_scale = tl.load(scales_ptr + at + O, mask=inside, other=0.0)
                up_sums += up_weight.to(tl.float32) * x * up_scale[:, :, None]
        else:
            sums += weight.to(tl.float32) * x
            if GATED:
                up_sums += up_weight.to(tl.float32) * x
        in_tile = in_out & (next_start < I) if EVEN else in_out & (next_start + column < I)
        weight = tl.load(weight_ptrs + next_start, mask=in_tile, other=0.0)
        if GATED:
            up_weight = tl.load(up_ptrs + next_start, mask=in_tile, other=0.0)
    result, up = tl.sum(tl.sum(sums, axis=2), axis=1), tl.sum(tl.sum(up_sums, axis=2), axis=1)
    if SCALE_GROUP == 0:
        result *= tl.load(scales_ptr + out, mask=out < O, other=0.0)
        if GATED:
            up *= tl.load(scales_ptr + O + out, mask=out < O, other=0.0)
    result = epilogue(result, up, bias_ptr, out, O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptr + out, result, mask=out < O)


@triton.jit(do_not_specialize=["T"])
def _many_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    O,
    I,
    T,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows in fp8. Programs go through bands of BAND tiles of rows, so that those which run at once share
    what they read."""
    program = tl.program_id(0)
    row_tiles, out_tiles = tl.cdiv(T, BLOCK_T), tl.cdiv(O, BLOCK_O)
    first_tile = program // (BAND * out_tiles) * BAND
    height = tl.minimum(row_tiles - first_tile, BAND)
    within = program % (BAND * out_tiles)
    row = (first_tile + within % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = within // height * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_I)
    # Rows and outputs beyond the last are the last one again, and are not stored.
    x_ptrs = x_ptr + tl.minimum(row, T - 1).to(tl.int64)[:, None] * I + column[None, :]
    weight_ptrs = weight_ptr + tl.minimum(out, O - 1).to(tl.int64)[None, :] * I + column[:, None]
    wait_for_inputs(PDL)

    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for start in range(0, I, BLOCK_I):
        if EVEN:
            x, weight = tl.load(x_ptrs + start), tl.load(weight_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(start + column < I)[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=(start + column < I)[:, None], other=0.0)
        if SCALE_GROUP > 0:
            group = start // SCALE_GROUP
            x_scale = tl.load(x_scales_ptr + group * T + row, mask=row < T, other=0.0)
            scale = tl.load(scales_ptr + group * O + out, mask=out < O, other=0.0)
            sums += tl.dot(x, weight) * (x_scale[:, None] * scale[None, :])
        else:
            # Tensor cores of Hopper keep fewer bits than float32 of sums of fp8.
            sums = tl.dot(x, weight, sums, max_num_imprecise_acc=BLOCK_I)
    if SCALE_GROUP == 0:
        x_scale = tl.load(x_scales_ptr + row, mask=row < T, other=0.0)
        scale = tl.load(scales_ptr + out, mask=out < O, other=0.0)
        sums = sums * x_scale[:, None] * scale[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * O + out[None, :]
    inside = (row < T)[:, None] & (out < O)[None, :]
    result = sums.to(out_ptr.dtype.element_ty)
    if ADD:
        before = tl.load(out_ptrs, mask=inside, other=0.0)
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=inside)


def fp8_group(matrix: Fp8Matrix, rows: int) -> int | None:
    """Returns the group size along columns for fp8 inputs of `num_rows` rows. 0: one scale per row. None: the
    matmul takes them as they are."""
    outs, inputs = matrix.data.shape
    shape = Shape(outs, inputs, group=matrix.group)
    chosen = choose(shape, rows, torch.float8_e4m3fn, gpu_of(matrix.data.device))
    return matrix.group if chosen.kernel in ROWS_ARE_FP8 else None


def fp8_linear(
    x_TI: torch.Tensor | Fp8Rows,
    matrix: Fp8Matrix,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias in x's dtype. It is added to `residual_TO` in place, if there is one, which is then
    returned. Rows in fp8 have the groups that `fp8_group` returned."""
    outs, inputs = matrix.data.shape
    shape = Shape(
        outs,
        inputs,
        after=After.NOTHING if residual_TO is None else After.ADD,
        bias=bias_O is not None,
        group=matrix.group,
    )
    return _run(x_TI, matrix, bias_O, shape, residual_TO)


def fp8_linear_gated(
    x_TI: torch.Tensor | Fp8Rows,
    matrix: Fp8Matrix,
    bias_2F: torch.Tensor | None,
    group: int | None = None,
    activation: str = "silu",
) -> torch.Tensor | Fp8Rows:
    """activation(first half of the outputs) * second half. `group`: what the matrix that takes it next asked
    for by `fp8_group`."""
    if fp8_group(matrix, len(x_TI)) is not None or activation != "silu":
        gate_up_T2F = fp8_linear(x_TI, matrix, bias_2F)
        if group is None:
            return gate_mul(gate_up_T2F, activation)
        return gate_mul_fp8(gate_up_T2F, group, activation)
    assert group is None  # Few rows are few for every matrix.
    outs, inputs = matrix.data.shape
    shape = Shape(outs // 2, inputs, after=After.SILU_MUL, bias=bias_2F is not None, group=matrix.group)
    return _run(x_TI, matrix, bias_2F, shape, None)


def fp8_linear_of_norm(
    residual_TI: torch.Tensor,
    norm_weight_I: torch.Tensor,
    eps: float,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """The matmul of the residual's norm, gated if there is an activation, where one kernel makes both. None:
    none does."""
    if activation not in (None, "silu"):
        return None
    weight_rows, inputs = matrix.data.shape
    outs, after = (weight_rows // 2, After.SILU_MUL) if activation else (weight_rows, After.NOTHING)
    shape = Shape(outs, inputs, Before.NORM, after, bias is not None, group=matrix.group)
    chosen = choose(shape, len(residual_TI), torch.float8_e4m3fn, gpu_of(matrix.data.device))
    if not chosen.norms or residual_TI.dtype != torch.bfloat16:
        return None
    return hopper_row.hopper_row_matmul(
        residual_TI, matrix, bias, shape.gated, norm_weight_I=norm_weight_I, eps=eps
    )


def _run(
    x_TI: torch.Tensor | Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    shape: Shape,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    rows, device = len(x_TI), matrix.data.device
    chosen = choose(shape, rows, torch.float8_e4m3fn, gpu_of(device))
    if chosen.kernel is Kernel.HOPPER_ROW and x_TI.dtype == torch.bfloat16:
        assert isinstance(x_TI, torch.Tensor)
        return hopper_row.hopper_row_matmul(x_TI, matrix, bias, shape.gated, residual_TO)
    out_TO = residual_TO
    if out_TO is None:
        like = matrix.scales.new_empty(0, dtype=x_TI.dtype)
        out_TO = empty_matmul_input(like, rows, shape.outs)
    assert out_TO.is_contiguous() and out_TO.shape == (rows, shape.outs) and out_TO.dtype == x_TI.dtype
    if rows == 0:
        return out_TO
    if chosen.kernel in ROWS_ARE_FP8:
        assert isinstance(chosen.tiles, RowTiles)
        if not isinstance(x_TI, Fp8Rows):
            x_TI = quantize(x_TI, matrix.group)
        if chosen.kernel is Kernel.FP8_TORCH and out_TO.dtype == torch.bfloat16:
            _by_torch(x_TI, matrix, bias, out_TO, residual_TO is not None)
        else:
            _many(chosen.tiles, x_TI, matrix, bias, out_TO, residual_TO is not None)
    else:
        assert isinstance(x_TI, torch.Tensor)
        if isinstance(chosen.tiles, RowTiles):
            activation = Activation() if shape.gated else None
            tile_matmul(chosen.tiles, x_TI, matrix, bias, out_TO, activation, residual_TO is not None)
        else:
            assert isinstance(chosen.tiles, ElementwiseTiles)
            _row(chosen.tiles, x_TI, matrix, bias, out_TO, shape)
    return out_TO


def _row(
    tiles: ElementwiseTiles,
    x_TI: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    out_TO: torch.Tensor,
    shape: Shape,
) -> None:
    assert x_TI.is_contiguous()
    _row_kernel[(cdiv(shape.outs, tiles.outs),)](
        x_TI,
        matrix.data,
        matrix.scales,
        bias,
        out_TO,
        shape.outs,
        shape.inputs,
        GATED=shape.gated,
        ADD=shape.after is After.ADD,
        EVEN=shape.inputs % tiles.columns == 0,
        SCALE_GROUP=matrix.group,
        BLOCK_O=tiles.outs,
        BLOCK_I=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=1,
        **pdl_options(),
    )


def _many(
    tiles: RowTiles, x: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, out_TO: torch.Tensor, add: bool
) -> None:
    assert x.group == matrix.group and x.data.is_contiguous()
    (rows, inputs), outs = x.data.shape, matrix.data.shape[0]
    stage_bytes = tiles.columns * (tiles.outs + tiles.rows)
    _many_kernel[(cdiv(rows, tiles.rows) * cdiv(outs, tiles.outs),)](
        x.data,
        x.scales,
        matrix.data,
        matrix.scales,
        bias,
        out_TO,
        outs,
        inputs,
        rows,
        ADD=add,
        EVEN=inputs % tiles.columns == 0,
        SCALE_GROUP=matrix.group,
        BLOCK_T=tiles.rows,
        BLOCK_O=tiles.outs,
        BLOCK_I=tiles.columns,
        BAND=8,
        num_warps=tiles.num_warps,
        num_stages=fitting_stages(tiles.num_stages, stage_bytes, x.data.device),
        **pdl_options(),
    )


def _by_torch(
    x: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, out_TO: torch.Tensor, add: bool
) -> None:
    """CUTLASS or cuBLAS, which write bf16 alone. Without `use_fast_accum` their sums are promoted as ours."""
    scales = x.scales.t(), matrix.scales  # [T, groups] and [groups, O], as both lie
    result = out_TO.new_empty(out_TO.shape) if add else out_TO
    torch._scaled_mm(x.data, matrix.data.t(), *scales, bias=bias, out_dtype=out_TO.dtype, out=result)
    if add:
        out_TO += result
