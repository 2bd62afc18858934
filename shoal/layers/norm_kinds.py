"""RMSNorms that differ in how their weight is stored and where they round, and norms before a sum.
ModelConfig.norm names the kind that a model's norms are of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.pieces import Pieces
from shoal.model_config import AttentionKind, ModelConfig


class FloatNorm(RMSNorm):
    """RMSNorm whose product with the weight is in float32, and rounded once."""

    def __init__(self, size: int, eps: float, ops: Ops, tp: TensorParallel | None = None) -> None:
        super().__init__(size, eps, ops, tp)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


class ZeroCentredNorm(FloatNorm):
    """A FloatNorm that a checkpoint stores as what its weight is above 1."""

    def _load(self, tensor: Loaded, name: str) -> None:
        super()._load(tensor, name)
        self.weight.data.add_(1.0)


class ScalelessNorm(RMSNorm):
    """RMSNorm whose weight is not in the checkpoint, as all of it is 1."""

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        return iter(())

    def finish(self) -> None:
        """Fills the weight each time that weights have come, as a sleep may have dropped it."""
        self.weight.data.fill_(1.0)


class LayerNorm(FloatNorm):
    """The norm of Ba et al. (2016), without a bias: the mean is taken off first. No kernel sums, norms and
    multiplies in one, so plain ones do."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x_TD.float(), x_TD.shape[-1:], self.weight, eps=self.eps).to(x_TD.dtype)

    def add(self, x_TD: torch.Tensor | Pieces | None, residual_TD: torch.Tensor) -> torch.Tensor:
        if isinstance(x_TD, Pieces):
            x_TD.add_to(residual_TD)
        elif x_TD is not None:
            residual_TD.add_(self._summed(x_TD))
        return self(residual_TD)

    def add_linear(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        linear: Linear,
        activation: str | None = None,
        reader: Linear | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TD = self.add(x_TD, residual_TD)
        if activation is None:
            return linear.format.matmul(normed_TD, linear.bias), residual_TD
        return linear.gated(normed_TD, activation, reader), residual_TD


KINDS: dict[str, type[RMSNorm]] = {
    "plain": RMSNorm,
    "float32": FloatNorm,
    "zero_centred": ZeroCentredNorm,
    "layer": LayerNorm,
}


def build_norm(config: ModelConfig, size: int, ops: Ops, tp: TensorParallel | None = None) -> RMSNorm:
    """A norm of the kind that the model's norms are of."""
    return KINDS[config.norm](size, config.rms_norm_eps, ops, tp)


def build_head_norm(config: ModelConfig, kind: AttentionKind, ops: Ops) -> RMSNorm | None:
    """The norm of each head of q or of k. None: they have none."""
    if kind.qk_rms:
        return ScalelessNorm(kind.head_dim, config.rms_norm_eps, ops)
    return build_norm(config, kind.head_dim, ops) if config.qk_norm else None


def add_normed(
    x_TD: torch.Tensor, norm: RMSNorm, residual_TD: torch.Tensor, following: RMSNorm | None = None
) -> torch.Tensor | None:
    """residual += norm(x) in place; returns the norm `following` of that sum, if there is one. x is whole on
    every rank."""
    after = (None, 0.0) if following is None else (following.weight, following.eps)
    return norm.ops.add_normed(x_TD, norm.weight, norm.eps, residual_TD, *after)
