"""Products of few rows with a weight matrix, in Triton. Their time is that of reading the weights.

Many rows, and float32, go to cuBLAS. On Hopper, what lies between goes to hopper_linear.py, gate and up of
thousands of rows to hopper_gated.py, and one row of a large weight to hopper_row.py.

A few rows are multiplied elementwise in float32 with tiles of the weight, the first of which is loaded before
the rows are there (pdl.py). More rows go to tensor cores. The weight is the left operand there, so that rows
are padded to 16 only. No sum is split over programs, so each result is one sum in a fixed order.

GATED: the weight is gate over up, and silu(gate) * up leaves the kernel instead of the two. ADD: the product,
rounded as one of its own, is added to what the output holds, the residual, which is loaded before the
product. RMSNorm before a product of one narrow row, and a residual sum before that, are part of the product,
because w (g * x) / rms(x) needs rms(x) only at its end.

T rows · I inputs · O outputs (F of a gated product, whose weight has 2F rows). The oracle is reference.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.activation import silu, silu_mul
from shoal.kernels.hopper import HAS_GLUON, MAX_ROWS, empty_product_input
from shoal.kernels.norm import add_rms_norm, rms_norm
from shoal.kernels.pdl import pdl_options, prefetch, wait_for_inputs

if HAS_GLUON:
    from shoal.kernels import hopper_gated, hopper_linear, hopper_row

PIECE = tl.constexpr(2048)  # bytes that a thread prefetches
# A product of at most as many warps runs at once. Prefetching makes it faster, and larger products slower
# (benchmarks/results/products.md).
ONE_WAVE = 4096
# cuBLAS adds a product of many rows to the residual up to as many inputs. Wider ones take longer so.
WIDEST_SUM = 8192
# The widest row whose norm is part of an elementwise product: each program reads x, residual and norm whole.
FUSED_COLUMNS = 2048


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: a program computes `outs` outputs of all rows, `columns` inputs at a time."""

    outs: int
    columns: int
    num_warps: int
    num_stages: int = 0  # of the pipeline into the tensor cores; 0: elementwise


def choose_tiles(rows: int, weight_rows: int, columns: int, gated: bool) -> Tiles | None:
    """How to cut a product. None: cuBLAS is as fast. All numbers are from a sweep on an H200 in bf16
    (benchmarks/kernels.py linear; benchmarks/results/products.md)."""
    if rows == 1:
        if columns <= 1024:
            return Tiles(4, 1024, 4) if weight_rows <= 4096 else Tiles(8, 512, 4)
        if columns <= 2048:
            return Tiles(2, 2048, 8 if weight_rows <= 1024 else 4)
        # Whole rows: all of them are in flight before the wait.
        if 3072 < columns <= 4096:
            return Tiles(1, 4096, 4) if gated else Tiles(2, 4096, 8)
        return Tiles(2, 1024, 4)  # Small tiles: more of them are there at once.
    if rows <= 4 and not gated and triton.next_power_of_2(rows) * weight_rows * columns <= 1 << 25:
        return Tiles(4, 256, 1) if columns <= 1024 else Tiles(4, 1024, 4)
    if (rows <= 16 and columns < 4096) or (rows <= 32 and weight_rows >= 24576):
        return Tiles(64, 128, 4, 5)
    return None


@triton.jit
def _prefetch_rows(weight_ptr, first, end, I, PDL: tl.constexpr):
    """Prefetches rows [first, end) of a weight, which lie in one piece."""
    start = tl.arange(0, tl.extra.cuda.num_threads()) * PIECE
    num_bytes = (end - first) * I * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    ptr = (weight_ptr + first.to(tl.int64) * I).to(tl.pointer_type(tl.int8))
    prefetch(ptr + start, tl.minimum(tl.maximum(num_bytes - start, 0), PIECE), PDL)


@triton.jit(do_not_specialize=["T"])
def _vector_kernel(
    x_ptr,
    norm_ptr,
    residual_ptr,
    sum_ptr,
    weight_ptr,
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
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product of T <= BLOCK_T rows, elementwise. EVEN: the inputs are whole tiles. WHOLE: they are one
    tile. PREFETCH: the tiles after the first are brought into the L2 cache.

    With `norm_ptr`, x is replaced by its RMSNorm, weighted by it. With `residual_ptr` too, x + residual takes
    the place of x, and the first program leaves that sum in `sum_ptr`. (What ADD adds to is in `out_ptr`.)
    """
    first = tl.program_id(0) * BLOCK_O
    out = first + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_I)[None, None, :]
    in_out, in_row = (out < O)[None, :, None], (row < T)[:, None, None]
    weight_ptrs = weight_ptr + out.to(tl.int64)[None, :, None] * I + column
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[None, :, None] * I + column
    offsets = row[:, None, None] * I + column
    in_tile = in_out if EVEN else in_out & (column < I)
    weight = tl.load(weight_ptrs, mask=in_tile, other=0.0)
    if GATED:
        up_weight = tl.load(up_ptrs, mask=in_tile, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column < I, other=0.0)
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
    sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_I), tl.float32)
    for start in range(0, BLOCK_I if WHOLE else I, BLOCK_I):
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
        sums += weight.to(tl.float32) * x32
        if GATED:
            up_sums += up_weight.to(tl.float32) * x32
        if not WHOLE:
            in_tile = in_out & (next_start < I) if EVEN else in_out & (next_start + column < I)
            weight = tl.load(weight_ptrs + next_start, mask=in_tile, other=0.0)
            if GATED:
                up_weight = tl.load(up_ptrs + next_start, mask=in_tile, other=0.0)
    result, up = tl.sum(sums, axis=2), tl.sum(up_sums, axis=2)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / I + eps)
        result *= scale
        up *= scale
    result = _finish(result, up, bias_ptr, out[None, :], O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=inside)


@triton.jit
def _finish(sums, up_sums, bias_ptr, out, O, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Bias and activation. Gate and up are rounded first, as two products would round them."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias_ptr + O + out, mask=out < O, other=0.0).to(tl.float32)
    result = sums.to(DTYPE)
    if GATED:
        result = (silu(result.to(tl.float32)) * up_sums.to(DTYPE).to(tl.float32)).to(DTYPE)
    return result


@triton.jit(do_not_specialize=["T"])
def _matrix_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    O,
    I,
    T,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The product of T <= BLOCK_T rows, by tensor cores: out^T = weight @ x^T."""
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_I)
    in_out, in_row = (out < O)[:, None], (row < T)[None, :]
    weight_ptrs = weight_ptr + out.to(tl.int64)[:, None] * I + column[None, :]
    up_ptrs = weight_ptr + (out + O).to(tl.int64)[:, None] * I + column[None, :]
    x_ptrs = x_ptr + row[None, :] * I + column[:, None]
    out_ptrs = out_ptr + row[None, :] * O + out[:, None]
    wait_for_inputs(PDL)

    if ADD:
        before = tl.load(out_ptrs, mask=in_out & in_row, other=0.0)
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    up_sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in range(0, I, BLOCK_I):
        if EVEN:
            x = tl.load(x_ptrs + start, mask=in_row, other=0.0)
            in_tile = in_out
        else:
            x = tl.load(x_ptrs + start, mask=in_row & (start + column < I)[:, None], other=0.0)
            in_tile = in_out & (start + column < I)[None, :]
        sums = tl.dot(tl.load(weight_ptrs + start, mask=in_tile, other=0.0), x, sums)
        if GATED:
            up_sums = tl.dot(tl.load(up_ptrs + start, mask=in_tile, other=0.0), x, up_sums)
    result = _finish(sums, up_sums, bias_ptr, out[:, None], O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=in_out & in_row)


@contextmanager
def _exact_sums(num_outs: int) -> Iterator[None]:
    """Inside this context cuBLAS adds the parts of a split sum in float32.

    PyTorch lets it round each part to 16 bits. cuBLAS does so where outputs are not aligned to 16 bytes, and
    the error is then three times that of one rounding. Other products are left alone: they have exact sums
    anyway, and the switch is the process's.
    """
    if num_outs % 8 == 0:
        yield
        return
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    y_TO = _multiply(x_TI, weight_OI, bias_O, gated=False)
    if y_TO is not None:
        return y_TO
    with _exact_sums(weight_OI.shape[0]):
        return F.linear(x_TI, weight_OI, bias_O)


def linear_add(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """residual += the product, in place, and returns None. A product that cuBLAS is slow to add is returned
    instead, for the next norm to add."""
    if _multiply(x_TI, weight_OI, bias_O, gated=False, residual_TO=residual_TO) is not None:
        return None
    with _exact_sums(weight_OI.shape[0]):
        if bias_O is not None or (x_TI.shape[0] > MAX_ROWS and x_TI.shape[1] > WIDEST_SUM):
            return F.linear(x_TI, weight_OI, bias_O)
        residual_TO.addmm_(x_TI, weight_OI.t())
    return None


def linear_silu_mul(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None
) -> torch.Tensor:
    """silu(first half of the outputs) * second half."""
    if HAS_GLUON and bias_2F is None and hopper_gated.is_for(x_TI, weight_2FI):
        return hopper_gated.hopper_gated_product(x_TI, weight_2FI)
    y_TF = _multiply(x_TI, weight_2FI, bias_2F, gated=True)
    return silu_mul(F.linear(x_TI, weight_2FI, bias_2F)) if y_TF is None else y_TF


def add_norm_linear(
    x_TD: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the norm of x + residual, and that sum. x None: there is nothing to add.

    For one narrow row this is one kernel, and the sum is a tensor of its own, because no program may write
    what others still read. More rows, and wide ones (but hopper_row.py's), are faster with a norm of their
    own."""
    if x_TD is None and HAS_GLUON and hopper_row.is_for(residual_TD, weight, gated):
        return hopper_row.hopper_row_product(
            residual_TD, weight, bias, gated, norm_weight_I=norm_weight_D, eps=eps
        ), residual_TD
    tiles = _tiles(residual_TD, weight, gated)
    if tiles is None or residual_TD.shape[0] > 1 or residual_TD.shape[1] > FUSED_COLUMNS:
        normed_TD = (
            rms_norm(residual_TD, norm_weight_D, eps)
            if x_TD is None
            else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
        )
        return (linear_silu_mul if gated else linear)(normed_TD, weight, bias), residual_TD
    if x_TD is None:
        return product(
            tiles, residual_TD, weight, bias, gated, norm=(norm_weight_D, None, None), eps=eps
        ), residual_TD
    assert residual_TD.is_contiguous()
    sum_TD = torch.empty_like(residual_TD)
    return product(
        tiles, x_TD, weight, bias, gated, norm=(norm_weight_D, residual_TD, sum_TD), eps=eps
    ), sum_TD


def _multiply(
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The product by one of our kernels. None: cuBLAS is as fast."""
    if HAS_GLUON and hopper_row.is_for(x_TI, weight, gated):
        return hopper_row.hopper_row_product(x_TI, weight, bias, gated, residual_TO)
    if HAS_GLUON and (hopper_tiles := hopper_linear.tiles_for(x_TI, weight, gated)):
        return hopper_linear.hopper_product(hopper_tiles, x_TI, weight, bias, gated, residual_TO)
    tiles = _tiles(x_TI, weight, gated)
    return None if tiles is None else product(tiles, x_TI, weight, bias, gated, residual_TO)


def _tiles(x_TI: torch.Tensor, weight: torch.Tensor, gated: bool) -> Tiles | None:
    if x_TI.shape[0] == 0 or x_TI.dtype == torch.float32:
        return None
    return choose_tiles(x_TI.shape[0], weight.shape[0], weight.shape[1], gated)


def product(
    tiles: Tiles,
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor | None, ...] = (None, None, None),
    eps: float = 0.0,
) -> torch.Tensor:
    """x @ weight^T + bias, cut as `tiles` say. The product is added to `residual_TO` in place, if there is
    one, which is then returned. `norm`, for elementwise products alone: the norm's weight, the residual to
    add to x before it (or None), and where that sum goes."""
    assert x_TI.is_contiguous() and weight.is_contiguous()
    (rows, columns), outs = x_TI.shape, weight.shape[0] // (1 + gated)
    out_TO = empty_product_input(x_TI, rows, outs) if residual_TO is None else residual_TO
    assert out_TO.is_contiguous() and out_TO.shape == (rows, outs) and out_TO.dtype == x_TI.dtype
    add = residual_TO is not None
    grid, even = (triton.cdiv(outs, tiles.outs),), columns % tiles.columns == 0
    if tiles.num_stages == 0:
        whole = columns <= tiles.columns
        _vector_kernel[grid](
            x_TI,
            *norm,
            weight,
            bias,
            out_TO,
            eps,
            outs,
            columns,
            rows,
            GATED=gated,
            ADD=add,
            EVEN=even,
            WHOLE=whole,
            PREFETCH=not whole and columns % 8 == 0 and grid[0] * tiles.num_warps <= ONE_WAVE,
            BLOCK_T=triton.next_power_of_2(rows),
            BLOCK_O=tiles.outs,
            BLOCK_I=tiles.columns,
            num_warps=tiles.num_warps,
            num_stages=1,
            **pdl_options(),
        )
    else:
        block_t = max(16, triton.next_power_of_2(rows))
        stage_bytes = (tiles.outs * (1 + gated) + block_t) * tiles.columns * weight.itemsize
        _matrix_kernel[grid](
            x_TI,
            weight,
            bias,
            out_TO,
            outs,
            columns,
            rows,
            GATED=gated,
            ADD=add,
            EVEN=even,
            BLOCK_T=block_t,
            BLOCK_O=tiles.outs,
            BLOCK_I=tiles.columns,
            num_warps=tiles.num_warps,
            num_stages=fitting_stages(tiles.num_stages, stage_bytes, weight.device),
            **pdl_options(),
        )
    return out_TO


def fitting_stages(num_stages: int, stage_bytes: int, device: torch.device) -> int:
    """How many stages of a pipeline there is room for. On many cards a program has no more than 99 KB of
    shared memory. A pipeline buffers one stage less than it has."""
    if device.type != "cuda":  # interpreted
        return num_stages
    return max(
        1,
        min(num_stages, 1 + _shared_memory(triton.runtime.driver.active.get_current_device()) // stage_bytes),
    )


@functools.cache
def _shared_memory(device: int) -> int:
    """The bytes of shared memory that a program can have, as Triton itself asks for them."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
