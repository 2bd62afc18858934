"""RMSNorm, alone or fused with the residual sum before it and the matmul after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, copy_into
from shoal.layers.parallel import TensorParallel
from shoal.layers.pieces import Pieces


class RMSNorm(LoadingLayer):
    """y = x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019).

    With `tp`, what is to be added to the residual before the norm is each rank's part of a sum over ranks.
    """

    def __init__(self, size: int, eps: float, ops: Ops, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.ops = eps, ops

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", tuple(self.weight.shape), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        copy_into(self.weight, tensor, name)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: torch.Tensor | Pieces | None, residual_TD: torch.Tensor) -> torch.Tensor:
        """residual += x in place; returns the norm of the sum. x None: nothing to add."""
        if isinstance(x_TD, Pieces):
            x_TD.add_to(residual_TD)
        if x_TD is None or isinstance(x_TD, Pieces):
            return self(residual_TD)
        normed_TD = self._sum_and_norm(x_TD, residual_TD)
        if normed_TD is not None:
            return normed_TD
        return self.ops.add_rms_norm(self._summed(x_TD), residual_TD, self.weight, self.eps)

    def add_linear(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        linear: Linear,
        activation: str | None = None,
        reader: Linear | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `linear`, or with an activation its `gated` for `reader`, of the norm of residual + x; and
        that sum, which is the new residual. `linear` is not split over its inputs. x None: nothing to add.

        One row takes one kernel, on one rank.
        """
        reads = None if reader is None else reader.format
        if x_TD is not None:
            normed_TD = self._sum_and_norm(x_TD, residual_TD)
            if normed_TD is not None:
                if activation is not None:
                    return linear.format.gated(normed_TD, linear.bias, activation, reads), residual_TD
                return linear.format.matmul(normed_TD, linear.bias), residual_TD
            x_TD = self._summed(x_TD)
        return linear.format.normed(x_TD, residual_TD, self.weight, self.eps, linear.bias, activation, reads)

    def _sum_and_norm(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor | None:
        """Does `add` in one kernel with the sum over the ranks. Returns None and does nothing without such
        a kernel."""
        sums = None if self.tp is None else self.tp.sums
        if sums is None or not sums.takes_rows(x_TD):
            return None
        return sums.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def _summed(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD if self.tp is None else self.tp.all_reduce(x_TD)
