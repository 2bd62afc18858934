"""ParallelLayer: a decoder layer whose attention and MLP read the same norm of the residual (Cohere)."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.attention import Attention
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.mlp import MLP
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig


class ParallelLayer(nn.Module):
    """residual += attention(norm(residual)) + mlp(norm(residual)). Both sums are whole on every rank, so
    nothing is left to the next layer."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        assert isinstance(kind.mixer, AttentionKind)
        self.self_attn = Attention(config, kind.mixer, tp, ops, backends)
        self.mlp = MLP(config, tp, ops)
        self.input_layernorm = build_norm(config, config.hidden_size, ops)

    def forward(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes and returns what DecoderLayer.forward does."""
        attention = self.self_attn
        normed_TD = self.input_layernorm.add(x_TD, residual_TD)
        qkv = attention.qkv_proj(normed_TD)
        out, residual = attention.attend(qkv, residual_TD, step)
        if out is None:
            return None, residual
        if step.select_S is not None:
            normed_TD = normed_TD[step.select_S]
        hidden = self.mlp.whole(normed_TD)
        return None, residual.add_(attention.o_proj(out)).add_(hidden)
