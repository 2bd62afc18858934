"""Matmuls with a weight in fp8 (e4m3), in Triton, for GPUs that know the type.

Few rows take the time of reading the weight. There activations stay as they are and each weight is widened in
registers, which e4m3 allows without rounding in bf16, float16 and float32: the results equal the
unpacked matrix's, without its bytes (launch.py).

Many rows are bound by arithmetic. They come in fp8 (fp8_quantize.py), and tensor cores multiply fp8 with fp8,
whose sums are promoted to float32 every 128 inputs. Scales of rows and outputs are applied to the sums at the
end, scales of groups of inputs to the sum of each group. torch has this matmul for Hopper and bf16; the
kernel here is for other cards, types and sizes.

ADD: the matmul, rounded as one of its own, is added to what the output holds, the residual.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows) · G groups of inputs. The
oracle is the matmul with the unpacked matrix, and of rows in fp8 with what they stand for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul
from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import After, Kernel, RowTiles, Shape, choose
from shoal.kernels.matmul.launch import choose_for, launch
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.matmul.shared_memory import fitting_stages
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.quant.fp8_quantize import gate_mul_fp8, quantize
from shoal.kernels.quant.fp8_tensor import Fp8Rows
from shoal.kernels.rounding import cdiv

ROWS_ARE_FP8 = (Kernel.FP8_MANY, Kernel.FP8_TORCH)


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
    """Returns the group size along columns for fp8 inputs of `rows` rows. 0: one scale per row. None: the
    matmul takes them as they are."""
    outs, inputs = matrix.data.shape
    shape = Shape(outs, inputs, group=matrix.group)
    chosen = choose(shape, rows, torch.float8_e4m3fn, dispatch.gpu_of(matrix.data.device))
    return matrix.group if chosen.kernel in ROWS_ARE_FP8 else None


def fp8_linear(
    x_TI: torch.Tensor | Fp8Rows,
    matrix: Fp8Matrix,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias in x's dtype. It is added to `residual_TO` in place, if there is one, which is then
    returned. Rows in fp8 have the groups that `fp8_group` returned."""
    return _run(x_TI, matrix, bias_O, False, residual_TO)


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
    return _run(x_TI, matrix, bias_2F, True, None)


def _run(
    x_TI: torch.Tensor | Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    add = residual_TO is not None
    after = After.SILU_MUL if gated else After.ADD if add else After.NOTHING
    chosen = choose_for(matrix, x_TI, bias, after=after)
    if chosen.kernel not in ROWS_ARE_FP8:
        assert isinstance(x_TI, torch.Tensor)
        return launch(chosen, x_TI, matrix, bias, gated, residual_TO)
    out_TO = residual_TO
    if out_TO is None:
        like = matrix.scales.new_empty(0, dtype=x_TI.dtype)
        out_TO = empty_matmul_input(like, len(x_TI), len(matrix.data) // (1 + gated))
    assert not gated and isinstance(chosen.tiles, RowTiles)
    assert out_TO.is_contiguous() and out_TO.shape == (len(x_TI), len(matrix.data))
    if not isinstance(x_TI, Fp8Rows):
        x_TI = quantize(x_TI, matrix.group)
    if chosen.kernel is Kernel.FP8_TORCH and out_TO.dtype == torch.bfloat16:
        _by_torch(x_TI, matrix, bias, out_TO, add)
    else:
        _many(chosen.tiles, x_TI, matrix, bias, out_TO, add)
    return out_TO


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
    """CUTLASS or cuBLAS, which write bf16 alone. Without `use_fast_accum` their sums are promoted as
    `_many_kernel` does."""
    scales = x.scales.t(), matrix.scales  # [T, groups] and [groups, O], as both lie
    result = out_TO.new_empty(out_TO.shape) if add else out_TO
    torch._scaled_mm(x.data, matrix.data.t(), *scales, bias=bias, out_dtype=out_TO.dtype, out=result)
    if add:
        out_TO += result
