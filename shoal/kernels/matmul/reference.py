"""Matmuls in plain PyTorch: the oracle of this room's kernels, and the CPU's where it has nothing faster.

T tokens · D hidden · F intermediate · I inputs · O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shoal.kernels.reference import add_rms_norm, gate_mul, rms_norm


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def float_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """The matmul in float32 with a weight in float32, [T, O] in float32."""
    return F.linear(x_TI.float(), weight_OI, bias_O)


def linear_add(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
) -> torch.Tensor | None:
    """Adds the matmul to the residual in place and returns None. Other modules may leave the residual alone
    instead and return the matmul, for the next norm to add."""
    residual_TO += F.linear(x_TI, weight_OI, bias_O)
    return None


def linear_gated(
    x_TI: torch.Tensor, weight_2FI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Returns `gate_mul` of the matmul, [T, F]."""
    return gate_mul(F.linear(x_TI, weight_2FI, bias_2F), activation)


def norm_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x, and `linear` of it."""
    normed_TD = rms_norm(x_TD, norm_weight_D, eps)
    return normed_TD, linear(normed_TD, weight, bias)


def norm_float_linear(
    x_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x, and `float_linear` of it."""
    normed_TD = rms_norm(x_TD, norm_weight_D, eps)
    return normed_TD, float_linear(normed_TD, weight, bias)


def add_norm_linear(
    x_TD: torch.Tensor | None,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors. The first is `linear`, or with an activation `linear_gated`, of the norm of
    residual + x. The second is that sum, which takes the residual's place, and may or may not be the same
    tensor. x None: there is nothing to add."""
    normed_TD = (
        rms_norm(residual_TD, norm_weight_D, eps)
        if x_TD is None
        else add_rms_norm(x_TD, residual_TD, norm_weight_D, eps)
    )
    if activation is None:
        return linear(normed_TD, weight, bias), residual_TD
    return linear_gated(normed_TD, weight, bias, activation), residual_TD
