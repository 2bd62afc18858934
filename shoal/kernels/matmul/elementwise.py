"""Matmuls of one to four rows with a weight in 32, 16 or 8 bits (e4m3), in Triton.

Reading the weights takes all of its time. The rows are multiplied elementwise in float32 with tiles of the
weight; the first is loaded before the rows are there (pdl.py). No sum is split over programs, so each result
is one sum in a fixed order. A weight in fp8 is widened in registers, which e4m3 allows without rounding.

GATED: the weight is gate over up, and silu(gate) * up leaves the kernel instead of the two. ADD: the matmul,
rounded as one of its own, is added to what the output holds, the residual, which is loaded before the
matmul. RMSNorm before a matmul of one narrow row, and a residual sum before that, are part of the matmul,
because w (g * x) / rms(x) needs rms(x) only at its end.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py, and
of fp8 the matmul with the unpacked matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import silu
from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import ElementwiseTiles
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.norm import normed_row
from shoal.kernels.pdl import pdl_options, prefetch, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2

PREFETCHED_BYTES = tl.constexpr(2048)  # by a thread
MOST_AHEAD = 4  # tiles of a row that have room in registers


@triton.jit
def _prefetch_rows(weight_ptr, first, end, I, PDL: tl.constexpr):
    """Prefetches rows [first, end) of a weight, which follow each other."""
    start = tl.arange(0, tl.extra.cuda.num_threads()) * PREFETCHED_BYTES
    num_bytes = (end - first) * I * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    ptr = (weight_ptr + first.to(tl.int64) * I).to(tl.pointer_type(tl.int8))
    prefetch(ptr + start, tl.minimum(tl.maximum(num_bytes - start, 0), PREFETCHED_BYTES), PDL)


@triton.jit
def _store_norm(x_ptr, norm_ptr, normed_ptr, eps, I, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    norm = tl.load(norm_ptr + at, mask=at < I, other=0.0)
    x = tl.load(x_ptr + at, mask=at < I, other=0.0)
    tl.store(normed_ptr + at, normed_row(x.to(tl.float32), norm, eps, I).to(x.dtype), mask=at < I)


@triton.jit
def _scaled(product, scales_ptr, out, start, O, I, NUM_OUTS, SCALE_GROUP: tl.constexpr):
    """Applies the scales of groups of inputs to products from input `start` on, which follow each other in
    parts that share a scale. Other scales are applied to the sums."""
    if scales_ptr is not None and SCALE_GROUP > 0:
        first = start + tl.arange(0, product.shape[2]) * product.shape[3]
        at = (first // SCALE_GROUP)[None, None, :] * NUM_OUTS + out[None, :, None]
        inside = (out < O)[None, :, None] & (first < I)[None, None, :]
        product *= tl.load(scales_ptr + at, mask=inside, other=0.0)[:, :, :, None]
    return product


@triton.jit(do_not_specialize=["T"])
def _vector_kernel(
    x_ptr,
    norm_ptr,
    normed_ptr,
    residual_ptr,
    sum_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    eps,
    O,
    I,
    T,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matmul of T <= BLOCK_T rows, elementwise. EVEN: the inputs are whole tiles. WHOLE: they are one
    tile. PREFETCH: the tiles after the first are brought into the L2 cache. AHEAD: the tiles of a
    plain matmul, all of which are loaded before the inputs are there; 0: only the first is. SCALE_GROUP: the
    inputs of a weight in fp8 that share a scale; 0: all of them, of an output.

    With `norm_ptr`, x is replaced by its RMSNorm, weighted by it. With `residual_ptr` too, x + residual takes
    the place of x, and the first program leaves that sum in `sum_ptr`. (What ADD adds to is in `out_ptr`.)
    With `normed_ptr` one more program stores the norm there.
    """
    first = tl.program_id(0) * BLOCK_O
    if normed_ptr is not None and first >= O:
        wait_for_inputs(PDL)
        _store_norm(x_ptr, norm_ptr, normed_ptr, eps, I, BLOCK_I)
        return
    WIDE: tl.constexpr = SCALE_GROUP if SCALE_GROUP > 0 and SCALE_GROUP < BLOCK_I else BLOCK_I
    PARTS: tl.constexpr = BLOCK_I // WIDE  # parts of a tile, with one scale each
    out = first + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, PARTS)[None, None, :, None] * WIDE + tl.arange(0, WIDE)[None, None, None, :]
    in_out, in_row = (out < O)[None, :, None, None], (row < T)[:, None, None, None]
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :, None, None] * I + column
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[None, :, None, None] * I + column
    offsets = row[:, None, None, None] * I + column
    num_outs = O * (1 + GATED)
    in_tile = in_out if EVEN else in_out & (column < I)
    weight = tl.load(weight_ptrs, mask=in_tile, other=0.0)
    if GATED:
        up_weight = tl.load(up_ptrs, mask=in_tile, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column < I, other=0.0)
    ahead = (weight,)
    for i in tl.static_range(1, AHEAD):
        inside = in_out if EVEN else in_out & (i * BLOCK_I + column < I)
        ahead = ahead + (tl.load(weight_ptrs + i * BLOCK_I, mask=inside, other=0.0),)  # type: ignore
    if PREFETCH and PDL:
        end = tl.minimum(first + BLOCK_O, O)
        _prefetch_rows(weight_ptr, first, end, I, PDL)
        if GATED:
            _prefetch_rows(weight_ptr, first + O, end + O, I, PDL)
    wait_for_inputs(PDL)

    out_ptrs = out_ptr + row[:, None] * O + out[None, :]
    inside = (row < T)[:, None] & (out < O)[None, :]
    if ADD:
        before = tl.load(out_ptrs, mask=inside, other=0.0)
    sums = tl.zeros((BLOCK_T, BLOCK_O, PARTS, WIDE), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_O, PARTS, WIDE), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, PARTS, WIDE), tl.float32)
    for i in tl.static_range(AHEAD):
        in_x = in_row if EVEN else in_row & (i * BLOCK_I + column < I)
        x = tl.load(x_ptr + offsets + i * BLOCK_I, mask=in_x, other=0.0)
        product = ahead[i].to(tl.float32) * x.to(tl.float32)
        sums += _scaled(product, scales_ptr, out, i * BLOCK_I, O, I, num_outs, SCALE_GROUP)
    for start in range(0, 0 if AHEAD > 0 else BLOCK_I if WHOLE else I, BLOCK_I):
        next_start = start + BLOCK_I
        in_x = in_row if EVEN else in_row & (start + column < I)
        x = tl.load(x_ptr + offsets + start, mask=in_x, other=0.0)
        if residual_ptr is not None:
            x = (
                x.to(tl.float32)
                + tl.load(residual_ptr + offsets + start, mask=in_x, other=0.0).to(tl.float32)
            ).to(x.dtype)
            tl.store(sum_ptr + offsets + start, x, mask=in_x & (first == 0))
        x32 = x.to(tl.float32)
        if norm_ptr is not None:
            squares += x32 * x32
            x32 *= norm.to(tl.float32)
            if not WHOLE:
                norm = tl.load(norm_ptr + next_start + column, mask=next_start + column < I, other=0.0)
        sums += _scaled(weight.to(tl.float32) * x32, scales_ptr, out, start, O, I, num_outs, SCALE_GROUP)
        if GATED:
            product = up_weight.to(tl.float32) * x32
            up_sums += _scaled(product, scales_ptr, out + O, start, num_outs, I, num_outs, SCALE_GROUP)
        if not WHOLE:
            in_tile = in_out & (next_start < I) if EVEN else in_out & (next_start + column < I)
            weight = tl.load(weight_ptrs + next_start, mask=in_tile, other=0.0)
            if GATED:
                up_weight = tl.load(up_ptrs + next_start, mask=in_tile, other=0.0)
    result, up = tl.sum(tl.sum(sums, axis=3), axis=2), tl.sum(tl.sum(up_sums, axis=3), axis=2)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=2) / I + eps)
        result *= scale
        up *= scale
    if scales_ptr is not None and SCALE_GROUP == 0:
        result *= tl.load(scales_ptr + out, mask=out < O, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales_ptr + O + out, mask=out < O, other=0.0)[None, :]
    result = _epilogue(result, up, bias_ptr, out[None, :], O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=inside)


@triton.jit
def _epilogue(sums, up_sums, bias_ptr, out, O, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Bias and activation. Gate and up are rounded first, as two matmuls would round them."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias_ptr + O + out, mask=out < O, other=0.0).to(tl.float32)
    result = sums.to(DTYPE)
    if GATED:
        result = (silu(result.to(tl.float32)) * up_sums.to(DTYPE).to(tl.float32)).to(DTYPE)
    return result


def elementwise_matmul(
    tiles: ElementwiseTiles,
    x_TI: torch.Tensor,
    weight: torch.Tensor | Fp8Matrix,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    eps: float = 0.0,
) -> torch.Tensor:
    """x @ weight^T + bias, cut as `tiles` say. The matmul is added to `residual_TO` in place, if there is
    one, which is then returned. `norm`: the norm's weight, where the norm is stored (of one row in one tile),
    the residual to add to x before it, and where that sum goes."""
    matrix, scales, group = weight if isinstance(weight, Fp8Matrix) else (weight, None, 0)
    assert x_TI.is_contiguous() and matrix.is_contiguous()
    (rows, columns), outs = x_TI.shape, matrix.shape[0] // (1 + gated)
    out_TO = empty_matmul_input(x_TI, rows, outs) if residual_TO is None else residual_TO
    assert out_TO.is_contiguous() and out_TO.shape == (rows, outs) and out_TO.dtype == x_TI.dtype
    programs, num_tiles = cdiv(outs, tiles.outs), cdiv(columns, tiles.columns)
    whole = num_tiles == 1
    run_at_once = programs * tiles.num_warps <= dispatch.gpu_of(x_TI.device).limits.prefetched_warps
    is_plain = rows == 1 and not gated and norm[0] is None
    ahead = num_tiles if run_at_once and is_plain and 1 < num_tiles <= MOST_AHEAD else 0
    _vector_kernel[(programs + (norm[1] is not None),)](
        x_TI,
        *norm,
        matrix,
        scales,
        bias,
        out_TO,
        eps,
        outs,
        columns,
        rows,
        GATED=gated,
        ADD=residual_TO is not None,
        EVEN=columns % tiles.columns == 0,
        WHOLE=whole,
        AHEAD=ahead,
        PREFETCH=run_at_once and not whole and not ahead and columns * matrix.itemsize % 16 == 0,
        SCALE_GROUP=group,
        BLOCK_T=next_power_of_2(rows),
        BLOCK_O=tiles.outs,
        BLOCK_I=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=1,
        **pdl_options(),
    )
    return out_TO
