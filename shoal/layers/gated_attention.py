"""GatedAttention: self-attention whose output is multiplied by a gate, which a matmul of its own makes."""

from __future__ import annotations

import torch

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.attention import Attention
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, ModelConfig


class GatedAttention(Attention):
    """Shapes: T tokens, S selected tokens, D hidden, X = H * N for this rank's H query heads of size N."""

    def __init__(
        self, config: ModelConfig, kind: AttentionKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(config, kind, tp, ops, backends)
        assert kind.gate is not None
        self.activation = kind.gate.activation
        size = kind.num_heads * (1 if kind.gate.per_head else kind.head_dim)
        self.gate_proj = Linear(config.hidden_size, {kind.gate.tensor: size}, tp, ops, split="columns")

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: CacheStep
    ) -> Stream:
        """Takes and returns what Attention.forward does."""
        normed_TD = norm.add(x_TD, residual_TD)
        qkv = self.qkv_proj(normed_TD)
        out, residual = self.attend(qkv, residual_TD, step)
        if out is None:
            return None, residual
        return self.o_proj.add_to(self.gated(out, normed_TD, step.select_S), residual), residual

    def gated(
        self, out_X: torch.Tensor, normed_TD: torch.Tensor, select_S: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the output of `attend`, [T, X] or [S, X], times its gate."""
        if select_S is not None:
            normed_TD = normed_TD[select_S]
        return self.ops.gate_output(out_X, self.gate_proj(normed_TD), self.activation)
