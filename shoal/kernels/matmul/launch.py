"""Launches the kernels that take weights of more than one format: choice (dispatch.py) and call.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows).
"""

from __future__ import annotations

import torch

from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import (
    After,
    Before,
    ElementwiseTiles,
    Kernel,
    Matmul,
    PackedTiles,
    RowTiles,
    Shape,
    choose,
)
from shoal.kernels.matmul.elementwise import elementwise_matmul
from shoal.kernels.matmul.loaders import Fp8Matrix, TiledWeight
from shoal.kernels.matmul.packed_rows import packed_rows_matmul
from shoal.kernels.matmul.tile_matmul import Weight, tile_linear, weight_shape
from shoal.kernels.quant.fp8_tensor import Fp8Rows

if HAS_GLUON:
    from shoal.kernels.matmul import hopper_row


def choose_for(
    weight: Weight,
    x_TI: torch.Tensor | Fp8Rows,
    bias: torch.Tensor | None,
    before: Before = Before.NOTHING,
    after: After = After.NOTHING,
) -> Matmul:
    weight_rows, inputs = weight_shape(weight)
    outs = weight_rows // 2 if after is After.SILU_MUL else weight_rows
    bits, group, dtype = 16, 0, x_TI.dtype
    if isinstance(weight, torch.Tensor):
        numbers = weight
    elif isinstance(weight, Fp8Matrix):
        numbers, group, dtype = weight.data, weight.group, weight.data.dtype
    else:
        numbers, bits, group = weight.words, weight.bits, weight.group
    shape = Shape(outs, inputs, before, after, bias is not None, bits, group)
    gpu = dispatch.gpu_of(numbers.device)
    if isinstance(weight, Fp8Matrix) and x_TI.dtype != torch.bfloat16:
        gpu = gpu._replace(hopper=False)  # Its ring cuts bf16 into numbers of fp8.
    return choose(shape, len(x_TI), dtype, gpu)


def launch(
    chosen: Matmul,
    x_TI: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    eps: float = 0.0,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_TO` in place, if there is one, which is then returned. `norm` and `eps`: what
    `elementwise_matmul` takes; a ring takes the norm's weight alone."""
    if chosen.kernel is Kernel.NOTHING:
        outs = weight_shape(weight)[0] // (1 + gated)
        return empty_matmul_input(x_TI, 0, outs) if residual_TO is None else residual_TO
    if chosen.kernel is Kernel.HOPPER_ROW:
        return hopper_row.hopper_row_matmul(
            x_TI, weight, bias, gated, residual_TO, norm_weight_I=norm[0], eps=eps
        )
    if isinstance(chosen.tiles, PackedTiles):
        assert isinstance(weight, TiledWeight)
        return packed_rows_matmul(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
    if isinstance(chosen.tiles, RowTiles):
        return tile_linear(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
    assert isinstance(chosen.tiles, ElementwiseTiles) and not isinstance(weight, TiledWeight)
    return elementwise_matmul(chosen.tiles, x_TI, weight, bias, gated, residual_TO, norm=norm, eps=eps)


def matmul_of_norm(
    residual_TI: torch.Tensor,
    norm_weight_I: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """The matmul of the residual's norm, gated if there is an activation, where one kernel makes both. None:
    none does."""
    if activation not in (None, "silu"):
        return None
    gated = activation is not None
    chosen = choose_for(weight, residual_TI, bias, Before.NORM, After.SILU_MUL if gated else After.NOTHING)
    if not chosen.norms:
        return None
    norm = norm_weight_I, None, None, None
    return launch(chosen, residual_TI, weight, bias, gated, norm=norm, eps=eps)
