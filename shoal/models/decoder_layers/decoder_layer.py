"""DecoderLayer: the decoder layer of the Llama line."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.attention import Attention
from shoal.layers.experts import MoE
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.mixer import build_mixer
from shoal.layers.mlp import MLP
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import LayerKind, ModelConfig


class DecoderLayer(nn.Module):
    """Pre-norm transformer block: residual += attention(norm(residual)), then residual +=
    mlp(norm(residual)).

    The last matmuls of attention and MLP add themselves to the residual. Where they can't
    (Linear.add_to), what is left to add is passed on with the residual, so that the sum and the next norm
    are one kernel. On several ranks it is each rank's part of what is to be added.
    """

    attention_class: type[Attention] | None = None  # None: as `build_mixer` chooses

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        assert kind.mixer is not None and kind.has_mlp
        self.self_attn = build_mixer(config, kind.mixer, tp, ops, backends, self.attention_class)
        experts = kind.experts
        self.mlp = MLP(config, tp, ops) if experts is None else MoE(config, experts, tp, ops)
        self.input_layernorm = build_norm(config, config.hidden_size, ops, tp)
        self.post_attention_layernorm = build_norm(config, config.hidden_size, ops, tp)

    def forward(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes what the layer before left to add to the residual (None: nothing), and the residual, which it
        may change in place. Returns the same two for the next layer.

        With `step.select_S` only these tokens' results are returned. Keys and values of all tokens are
        written to the cache; the rest of the layer runs for the selected ones.
        """
        x, residual = self.self_attn(x_TD, residual_TD, self.input_layernorm, step)
        if len(residual) == 0:
            return None, residual
        return self.mlp(x, residual, self.post_attention_layernorm)
