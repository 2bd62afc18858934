"""MuseLayer: the decoder layer of Muse Glimmer. A sandwich of norms with a gate behind attention."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from shoal.attention.backend import Backends
from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.ops import Ops
from shoal.layers.gated_attention import GatedAttention
from shoal.layers.norm_kinds import add_normed
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder_layers.sandwich_layer import SandwichLayer


class MuseLayer(SandwichLayer):
    """residual += norm(gate * attention(norm(residual))), then residual += norm(mlp(norm(residual))). The
    final norm of the model is of another kind than these."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(replace(config, norm="zero_centred"), kind, tp, ops, backends)
        assert isinstance(kind.mixer, AttentionKind)
        self.self_attn: GatedAttention = GatedAttention(config, kind.mixer, tp, ops, backends)
        assert config.post_norm_eps is not None
        for norm in (self.post_attention_layernorm, self.post_feedforward_layernorm):
            norm.eps = config.post_norm_eps

    def forward(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        step: StepInput,
        cache: LayerCache,
        cos_sin: torch.Tensor | None,
        select_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Takes and returns what DecoderLayer.forward does."""
        attention, mlp = self.self_attn, self.mlp
        normed_TD = self.input_layernorm.add(x_TD, residual_TD)
        qkv = attention.qkv_proj(normed_TD)
        out, residual = attention.attend(qkv, residual_TD, step, cache, cos_sin, select_S)
        if out is None:
            return None, residual
        gated = attention.gated(out, normed_TD, select_S)
        normed = add_normed(
            attention.o_proj(gated), self.post_attention_layernorm, residual, self.pre_feedforward_layernorm
        )
        hidden = mlp.gate_up_proj.gated(cast(torch.Tensor, normed), mlp.activation, mlp.down_proj)
        add_normed(mlp.down_proj(hidden), self.post_feedforward_layernorm, residual)
        return None, residual
