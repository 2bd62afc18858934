"""SandwichLayer: the decoder layer of Gemma 2 and 3. There are norms before and after attention and MLP."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.attention import Attention
from shoal.layers.experts import MoE
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.mixer import build_mixer
from shoal.layers.mlp import MLP
from shoal.layers.norm_kinds import add_normed, build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig


class SandwichLayer(nn.Module):
    """residual += norm(attention(norm(residual))), then residual += norm(mlp(norm(residual))). What is added
    is whole on every rank before it is normed, so nothing is left to the next layer."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        assert isinstance(kind.mixer, AttentionKind)
        self.self_attn = cast(Attention, build_mixer(config, kind.mixer, tp, ops, backends))
        self.mlp = self.build_mlp(config, kind, tp, ops)
        size = config.hidden_size
        self.input_layernorm = build_norm(config, size, ops)
        self.post_attention_layernorm = build_norm(config, size, ops)
        self.pre_feedforward_layernorm = build_norm(config, size, ops)
        self.post_feedforward_layernorm = build_norm(config, size, ops)

    def build_mlp(self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops) -> MLP | MoE:
        return MLP(config, tp, ops)

    def forward(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes and returns what DecoderLayer.forward does."""
        attention = self.self_attn
        qkv, residual = self.input_layernorm.add_linear(x_TD, residual_TD, attention.qkv_proj)
        out, residual = attention.attend(qkv, residual, step)
        if out is None:
            return None, residual
        self.feed_forward(attention.o_proj(out), residual)
        return None, residual

    def feed_forward(self, attended_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
        """Adds what attention gave, and then the MLP's result, each normed."""
        normed = add_normed(
            attended_TD, self.post_attention_layernorm, residual_TD, self.pre_feedforward_layernorm
        )
        hidden = self.mlp.whole(cast(torch.Tensor, normed))
        add_normed(hidden, self.post_feedforward_layernorm, residual_TD)
