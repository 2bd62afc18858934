"""Matmuls with a weight matrix in 16 or 32 bits, by the kernel that dispatch.py chooses: one for weights of
any format (launch.py), one of Hopper's, or cuBLAS.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from shoal.kernels.activation import gate_mul
from shoal.kernels.hopper import HAS_GLUON, empty_matmul_input
from shoal.kernels.matmul.dispatch import After, Before, ElementwiseTiles, HopperTiles, Kernel, Matmul
from shoal.kernels.matmul.elementwise import elementwise_matmul
from shoal.kernels.matmul.launch import choose_for, launch
from shoal.kernels.norm import add_rms_norm, rms_norm

if HAS_GLUON:
    from shoal.kernels.matmul import hopper_gated, hopper_linear

ALIGNED_OUTS = 8  # outputs of 16 bits in 16 bytes
PADDED_FROM = 1024  # More rows are worth a padded copy of their weight.
FLAGS_LOCK = threading.Lock()  # for PyTorch's flags of matmuls, which engines in several threads share


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
    return _run(choose_for(weight_OI, x_TI, bias_O), x_TI, weight_OI, bias_O)


def linear_add(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """residual += the matmul, in place, and returns None. A matmul that cuBLAS is slow to add is returned
    instead, for the next norm to add."""
    chosen = choose_for(weight_OI, x_TI, bias_O, after=After.ADD)
    if not chosen.adds:
        return _run(chosen, x_TI, weight_OI, bias_O)
    _run(chosen, x_TI, weight_OI, bias_O, residual_TO=residual_TO)
    return None


def linear_gated(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """activation(first half of the outputs) * second half."""
    chosen = choose_for(weight_2FI, x_TI, bias_2F, after=After.SILU_MUL)
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
    chosen = choose_for(weight, residual_TD, bias, before, After.SILU_MUL if gated else After.NOTHING)
    if not chosen.norms:
        normed_TD = (
            rms_norm(residual_TD, norm_weight_D, eps)
            if x_TD is None
            else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
        )
        return _run(chosen, normed_TD, weight, bias, activation), residual_TD
    norm: tuple[torch.Tensor | None, ...] = norm_weight_D, None, None, None
    if x_TD is None:
        return launch(chosen, residual_TD, weight, bias, gated, norm=norm, eps=eps), residual_TD
    assert residual_TD.is_contiguous()
    sum_TD = torch.empty_like(residual_TD)
    norm = norm_weight_D, None, residual_TD, sum_TD
    return launch(chosen, x_TD, weight, bias, gated, norm=norm, eps=eps), sum_TD


def norm_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x, and the matmul of it. One row takes one kernel."""
    tiles = choose_for(weight, x_TD, bias, Before.NORM).tiles
    if not (len(x_TD) == 1 and isinstance(tiles, ElementwiseTiles) and x_TD.shape[1] <= tiles.columns):
        normed_TD = rms_norm(x_TD, norm_weight_D, eps)
        return normed_TD, linear(normed_TD, weight, bias)
    normed_TD = empty_matmul_input(x_TD, *x_TD.shape)
    norm = norm_weight_D, normed_TD, None, None
    return normed_TD, elementwise_matmul(tiles, x_TD, weight, bias, False, norm=norm, eps=eps)


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
    if isinstance(chosen.tiles, HopperTiles):
        return hopper_linear.hopper_matmul(chosen.tiles, x_TI, weight, bias, gated, residual_TO)
    if chosen.kernel is not Kernel.CUBLAS:
        return launch(chosen, x_TI, weight, bias, gated, residual_TO)
    if gated:
        return gate_mul(F.linear(x_TI, weight, bias))
    is_padded = weight.shape[0] % ALIGNED_OUTS and len(x_TI) > max(weight.shape[0], PADDED_FROM)
    if is_padded and residual_TO is None:
        return _padded_linear(x_TI, weight, bias)
    with _exact_sums(weight.shape[0]):
        if residual_TO is None:
            return F.linear(x_TI, weight, bias)
        return residual_TO.addmm_(x_TI, weight.t())
