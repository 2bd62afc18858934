"""RMSNorm, alone or fused with the residual sum before it."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear, Loaded, copy_into


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.ops = eps, ops

    def load(self, parameter: str, tensor: Loaded, part: int, name: str) -> None:
        copy_into(self.weight, tensor, name)

    def add(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor) -> torch.Tensor:
        """residual += x in place; returns the norm of the sum. x None: nothing to add."""
        if x_TD is None:
            return self.ops.rms_norm(residual_TD, self.weight, self.eps)
        return self.ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def add_linear(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, linear: Linear, silu_mul: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`linear` (not split over its inputs), or its `silu_mul`, of the norm of residual + x; and that sum,
        the new residual.

        One kernel if there is one row. x None: nothing to add.
        """
        if linear.packed is None:
            return self.ops.add_norm_linear(
                x_TD,
                residual_TD,
                self.weight,
                self.eps,
                linear.weight,  # type: ignore[arg-type]
                linear.bias,
                silu_mul,
            )
        return (linear.silu_mul if silu_mul else linear)(self.add(x_TD, residual_TD)), residual_TD
