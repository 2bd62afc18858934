"""GatedSandwichLayer: a sandwich of norms with a gate after attention, and an MLP or experts."""

from __future__ import annotations

import torch

from shoal.kernels.ops import Ops
from shoal.layers.experts import MoE
from shoal.layers.gated_attention import GatedAttention
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.mlp import MLP
from shoal.layers.parallel import TensorParallel
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.decoder_layers.sandwich_layer import SandwichLayer


class GatedSandwichLayer(SandwichLayer):
    """residual += norm(gate * attention(norm(residual))), then residual += norm(mlp(norm(residual)))."""

    self_attn: GatedAttention

    def build_mlp(self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops) -> MLP | MoE:
        if kind.experts is None:
            return super().build_mlp(config, kind, tp, ops)
        return MoE(config, kind.experts, tp, ops)

    def forward(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes and returns what DecoderLayer.forward does."""
        attention = self.self_attn
        normed_TD = self.input_layernorm.add(x_TD, residual_TD)
        qkv = attention.qkv_proj(normed_TD)
        out, residual = attention.attend(qkv, residual_TD, step)
        if out is None:
            return None, residual
        self.feed_forward(attention.o_proj(attention.gated(out, normed_TD, step.select_S)), residual)
        return None, residual
