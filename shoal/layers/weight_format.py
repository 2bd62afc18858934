"""WeightFormat: one rank's matrix of weights as it is stored, and the matmuls that it takes part in.

A layer shards and merges; it asks its format for everything else. Formats of fewer bits are in
packed_weight.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.kernels.ops import Ops


class WeightFormat:
    """A rank's [O, I] matrix. Matmuls without a kernel for the format are composed from its other matmuls.

    T tokens · I inputs · O outputs (F of a gated matmul, whose matrix has 2F rows)."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The memory of the weights, by name, but for parameters of the layer."""
        return {}

    def fp8_group(self, num_rows: int) -> int | None:
        """Returns the group size along columns for fp8 inputs of `num_rows` rows. 0: one scale per row.
        None: pass bf16 or fp16."""
        return None

    def matmul(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, O]."""
        raise NotImplementedError

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, [T, I]."""
        raise NotImplementedError

    def add(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None:
        """Adds the matmul to the residual in place, and returns None; or leaves the sum to the next norm,
        and returns the matmul."""
        return self.matmul(x_TI, bias_O)

    def gated(
        self, x_TI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str, reader: WeightFormat | None
    ) -> torch.Tensor:
        """activation(first half of the outputs) * second half, [T, F], as `reader` wants it."""
        return self.ops.gate_mul(self.matmul(x_TI, bias_2F), activation)

    def normed(
        self,
        x_TI: torch.Tensor | None,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
        reader: WeightFormat | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The matmul of the norm of residual + x (x None: of the residual), with an activation gated (as
        `reader` wants it); and that sum."""
        normed_TI = (
            self.ops.rms_norm(residual_TI, norm_weight_I, eps)
            if x_TI is None
            else self.ops.add_rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        )
        if activation is None:
            return self.matmul(normed_TI, bias_O), residual_TI
        return self.gated(normed_TI, bias_O, activation, reader), residual_TI


class PlainWeight(WeightFormat):
    """Numbers of the engine's dtype, in a parameter of the layer."""

    def __init__(self, ops: Ops, weight_OI: torch.Tensor) -> None:
        super().__init__(ops)
        self.weight_OI = weight_OI

    def matmul(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return self.ops.linear(x_TI, self.weight_OI, bias_O)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.ops.embed(ids_T, self.weight_OI)

    def add(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None:
        return self.ops.linear_add(x_TI, self.weight_OI, bias_O, residual_TO)

    def gated(
        self, x_TI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str, reader: WeightFormat | None
    ) -> torch.Tensor:
        return self.ops.linear_gated(x_TI, self.weight_OI, bias_2F, activation)

    def normed(
        self,
        x_TI: torch.Tensor | None,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
        reader: WeightFormat | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = norm_weight_I, eps, self.weight_OI, bias_O
        return self.ops.add_norm_linear(x_TI, residual_TI, *weights, activation)
