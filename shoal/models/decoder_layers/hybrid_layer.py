"""HybridLayer: a decoder layer of models whose layers differ in their mixers, or lack a mixer or an MLP."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.layer_cache import LayerMemory, LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kinds.latent import LatentKind
from shoal.kinds.recurrent import ChannelDeltaKind, DeltaKind, Mamba2Kind, ShortConvKind
from shoal.layers.experts import MoE
from shoal.layers.layer_step import LayerStep, Stream
from shoal.layers.mixer import build_mixer
from shoal.layers.mlp import MLP
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.layers.plain_experts import PlainMoE
from shoal.layers.plain_mlp import PlainMLP
from shoal.model_config import AttentionKind, LayerKind, ModelConfig

# a mixer's kind -> its module's name, as most checkpoints have it
NAMES = {
    AttentionKind: "self_attn",
    LatentKind: "self_attn",
    DeltaKind: "linear_attn",
    ChannelDeltaKind: "self_attn",
    Mamba2Kind: "mamba",
    ShortConvKind: "conv",
}


class HybridLayer(nn.Module):
    """residual += mixer(norm(residual)), then residual += mlp(norm(residual)), as in DecoderLayer. A layer
    with one of the two alone has `input_layernorm` alone."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        self.mixer_name = None if kind.mixer is None else NAMES[type(kind.mixer)]
        if kind.mixer is not None:
            self.add_module(NAMES[type(kind.mixer)], build_mixer(config, kind.mixer, tp, ops, backends))
        self.input_layernorm = build_norm(config, config.hidden_size, ops, tp)
        self.mlp: nn.Module | None = None
        if kind.experts is not None:
            moe = MoE if kind.experts.activation.has_gate else PlainMoE
            self.mlp = moe(config, kind.experts, tp, ops)
        elif kind.has_mlp:
            self.mlp = (PlainMLP if config.activation == "relu2" else MLP)(config, tp, ops)
        if kind.has_mlp and kind.mixer is not None:
            self.post_attention_layernorm = build_norm(config, config.hidden_size, ops, tp)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: LayerStep[LayerMemory]
    ) -> Stream:
        """Takes and returns what DecoderLayer.forward does."""
        x, residual, norm = x_TD, residual_TD, self.input_layernorm
        if self.mixer_name is not None:
            mixer = getattr(self, self.mixer_name)
            x, residual = mixer(x, residual, norm, step)
            if self.mlp is None:
                return x, residual
            norm = self.post_attention_layernorm
        elif (select_S := step.select_S) is not None:
            x, residual = None if x is None else x[select_S], residual[select_S]
        if len(residual) == 0:
            return None, residual
        assert self.mlp is not None
        return self.mlp(x, residual, norm)

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies pending inputs, of accepted drafts, to the states of these sequences."""
        assert self.mixer_name is not None
        getattr(self, self.mixer_name).apply_pending(memory, sequences)
