"""Matmuls with a weight matrix in 16 or 32 bits, by the kernel that dispatch.py chooses: tensor cores'
(tile_matmul.py), one of Hopper's, cuBLAS, or the one here, in Triton, for one to four rows.

Reading the weights takes all of its time. The rows are multiplied elementwise in float32 with tiles of the
weight; the first is loaded before the rows are there (pdl.py). No sum is split over programs, so each result
is one sum in a fixed order.

GATED: the weight is gate over up, and silu(gate) * up leaves the kernel instead of the two. ADD: the matmul,
rounded as one of its own, is added to what the output holds, the residual, which is loaded before the
matmul. RMSNorm before a matmul of one narrow row, and a residual sum before that, are part of the matmul,
because w (g * x) / rms(x) needs rms(x) only at its end.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.activation import gate_mul, silu
from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import (
    After,
    Before,
    ElementwiseTiles,
    HopperTiles,
    Kernel,
    Matmul,
    RowTiles,
    Shape,
    choose,
)
from shoal.kernels.matmul.tile_matmul import tile_linear
from shoal.kernels.norm import add_rms_norm, normed_row, rms_norm
from shoal.kernels.pdl import pdl_options, prefetch, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2

if HAS_GLUON:
    from shoal.kernels.matmul import hopper_gated, hopper_linear, hopper_row

PREFETCHED_BYTES = tl.constexpr(2048)  # by a thread
ALIGNED_OUTS = 8  # outputs of 16 bits in 16 bytes
PADDED_FROM = 1024  # More rows are worth a padded copy of their weight.
MOST_AHEAD = 4  # tiles of a row that have room in registers
FLAGS_LOCK = threading.Lock()  # for PyTorch's flags of matmuls, which engines in several threads share


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


@triton.jit(do_not_specialize=["T"])
def _vector_kernel(
    x_ptr,
    norm_ptr,
    normed_ptr,
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
    AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matmul of T <= BLOCK_T rows, elementwise. EVEN: the inputs are whole tiles. WHOLE: they are one
    tile. PREFETCH: the tiles after the first are brought into the L2 cache. AHEAD: the tiles of a
    plain matmul, all of which are loaded before the inputs are there; 0: only the first is.

    With `norm_ptr`, x is replaced by its RMSNorm, weighted by it. With `residual_ptr` too, x + residual takes
    the place of x, and the first program leaves that sum in `sum_ptr`. (What ADD adds to is in `out_ptr`.)
    With `normed_ptr` one more program stores the norm there.
    """
    first = tl.program_id(0) * BLOCK_O
    if normed_ptr is not None and first >= O:
        wait_for_inputs(PDL)
        _store_norm(x_ptr, norm_ptr, normed_ptr, eps, I, BLOCK_I)
        return
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
    sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_O, BLOCK_I), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_I), tl.float32)
    for i in tl.static_range(AHEAD):
        in_x = in_row if EVEN else in_row & (i * BLOCK_I + column < I)
        x = tl.load(x_ptr + offsets + i * BLOCK_I, mask=in_x, other=0.0)
        sums += ahead[i].to(tl.float32) * x.to(tl.float32)
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
    result = epilogue(result, up, bias_ptr, out[None, :], O, out_ptr.dtype.element_ty, GATED)
    if ADD:
        result = (before.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptrs, result, mask=inside)


@triton.jit
def epilogue(sums, up_sums, bias_ptr, out, O, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """Bias and activation. Gate and up are rounded first, as two matmuls would round them."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < O, other=0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias_ptr + O + out, mask=out < O, other=0.0).to(tl.float32)
    result = sums.to(DTYPE)
    if GATED:
        result = (silu(result.to(tl.float32)) * up_sums.to(DTYPE).to(tl.float32)).to(DTYPE)
    return result


@contextmanager
def _exact_sums(num_outs: int) -> Iterator[None]:
    """Inside this context cuBLAS adds the parts of a split sum in float32.

    PyTorch lets it round each part to 16 bits. cuBLAS does so where outputs are not aligned to 16 bytes, and
    the error is then three times one rounding's. Other matmuls are left alone: they have exact sums
    anyway. The two flags are the process's, so one thread at a time sets and restores them.
    """
    if num_outs % ALIGNED_OUTS == 0:
        yield
        return
    flags = torch.backends.cuda.matmul
    with FLAGS_LOCK:
        before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
        flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = False
        try:
            yield
        finally:
            flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = (
                before
            )


def _padded_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias by a weight with rows of zeros behind its own, for outputs that are not aligned to
    16 bytes: cuBLAS has only slow kernels for these. With more rows than outputs, the weight is the smaller
    copy."""
    outs = len(weight_OI)
    more = -outs % ALIGNED_OUTS
    bias = None if bias_O is None else F.pad(bias_O, (0, more))
    return F.linear(x_TI, F.pad(weight_OI, (0, 0, 0, more)), bias)[:, :outs].contiguous()


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return _run(_choose(x_TI, weight_OI, bias_O), x_TI, weight_OI, bias_O)


def linear_add(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """residual += the matmul, in place, and returns None. A matmul that cuBLAS is slow to add is returned
    instead, for the next norm to add."""
    chosen = _choose(x_TI, weight_OI, bias_O, after=After.ADD)
    if not chosen.adds:
        return _run(chosen, x_TI, weight_OI, bias_O)
    _run(chosen, x_TI, weight_OI, bias_O, residual_TO=residual_TO)
    return None


def linear_gated(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """activation(first half of the outputs) * second half."""
    chosen = _choose(x_TI, weight_2FI, bias_2F, after=After.SILU_MUL)
    if activation != "silu" and chosen.kernel is not Kernel.HOPPER_GATED:  # The others end with SiLU alone.
        return gate_mul(linear(x_TI, weight_2FI, bias_2F), activation)
    return _run(chosen, x_TI, weight_2FI, bias_2F, activation)


def add_norm_linear(
    x_TD: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matmul of the norm of x + residual, gated if there is an activation, and that sum. x None: there is
    nothing to add.

    Where the norm is part of the matmul, there is one kernel, and the sum is a tensor of its own, because no
    program may write what others still read."""
    if activation not in (None, "silu"):
        gate_up_T2F, sum_TD = add_norm_linear(x_TD, residual_TD, norm_weight_D, eps, weight, bias, None)
        return gate_mul(gate_up_T2F, activation), sum_TD
    gated = activation is not None
    before = Before.NORM if x_TD is None else Before.SUM_AND_NORM
    chosen = _choose(residual_TD, weight, bias, before, After.SILU_MUL if gated else After.NOTHING)
    if not chosen.norms:
        normed_TD = (
            rms_norm(residual_TD, norm_weight_D, eps)
            if x_TD is None
            else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
        )
        return _run(chosen, normed_TD, weight, bias, activation), residual_TD
    if chosen.kernel is Kernel.HOPPER_ROW:
        return hopper_row.hopper_row_matmul(
            residual_TD, weight, bias, gated, norm_weight_I=norm_weight_D, eps=eps
        ), residual_TD
    assert isinstance(chosen.tiles, ElementwiseTiles)
    if x_TD is None:
        return elementwise_matmul(
            chosen.tiles, residual_TD, weight, bias, gated, norm=(norm_weight_D, None, None, None), eps=eps
        ), residual_TD
    assert residual_TD.is_contiguous()
    sum_TD = torch.empty_like(residual_TD)
    norm = norm_weight_D, None, residual_TD, sum_TD
    return elementwise_matmul(chosen.tiles, x_TD, weight, bias, gated, norm=norm, eps=eps), sum_TD


def norm_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x, and the matmul of it. One row takes one kernel."""
    tiles = _choose(x_TD, weight, bias, Before.NORM).tiles
    if not (len(x_TD) == 1 and isinstance(tiles, ElementwiseTiles) and x_TD.shape[1] <= tiles.columns):
        normed_TD = rms_norm(x_TD, norm_weight_D, eps)
        return normed_TD, linear(normed_TD, weight, bias)
    normed_TD = empty_matmul_input(x_TD, *x_TD.shape)
    norm = norm_weight_D, normed_TD, None, None
    return normed_TD, elementwise_matmul(tiles, x_TD, weight, bias, False, norm=norm, eps=eps)


def _choose(
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: Before = Before.NOTHING,
    after: After = After.NOTHING,
) -> Matmul:
    weight_rows, inputs = weight.shape
    outs = weight_rows // 2 if after is After.SILU_MUL else weight_rows
    shape = Shape(outs, inputs, before, after, bias is not None)
    return choose(shape, x_TI.shape[0], x_TI.dtype, dispatch.gpu_of(x_TI.device))


def _run(
    chosen: Matmul,
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """The matmul by the kernel that was chosen, gated if there is an activation. It is added to `residual_TO`
    in place, if there is one, which is then returned."""
    gated = activation is not None
    if chosen.kernel is Kernel.HOPPER_GATED:
        assert activation is not None
        return hopper_gated.hopper_gated_matmul(x_TI, weight, activation)
    if chosen.kernel is Kernel.HOPPER_ROW:
        return hopper_row.hopper_row_matmul(x_TI, weight, bias, gated, residual_TO)
    match chosen.tiles:
        case HopperTiles():
            return hopper_linear.hopper_matmul(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
        case RowTiles():
            return tile_linear(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
        case ElementwiseTiles():
            return elementwise_matmul(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
    if gated:
        return gate_mul(F.linear(x_TI, weight, bias))
    is_padded = weight.shape[0] % ALIGNED_OUTS and len(x_TI) > max(weight.shape[0], PADDED_FROM)
    if is_padded and residual_TO is None:
        return _padded_linear(x_TI, weight, bias)
    with _exact_sums(weight.shape[0]):
        if residual_TO is None:
            return F.linear(x_TI, weight, bias)
        return residual_TO.addmm_(x_TI, weight.t())


def elementwise_matmul(
    tiles: ElementwiseTiles,
    x_TI: torch.Tensor,
    weight: torch.Tensor,
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
    assert x_TI.is_contiguous() and weight.is_contiguous()
    (rows, columns), outs = x_TI.shape, weight.shape[0] // (1 + gated)
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
        weight,
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
        PREFETCH=run_at_once and not whole and not ahead and columns % 8 == 0,
        BLOCK_T=next_power_of_2(rows),
        BLOCK_O=tiles.outs,
        BLOCK_I=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=1,
        **pdl_options(),
    )
    return out_TO
