"""Per-layer embeddings: each layer has an embedding of a token of its own, in addition to the one that enters
the first layer. All layers' are one table. They are added to what a matmul makes of the first layer's
input."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.embedding import Vocabulary
from shoal.layers.linear import Linear
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class PerLayerEmbeddings(nn.Module):
    """Shapes: T tokens, L layers, P numbers of each layer's embedding, D hidden."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        size, width = config.per_layer_size, config.per_layer_size * config.num_layers
        self.size, self.shrink = size, config.hidden_size**-0.5
        self.embed_tokens_per_layer = Vocabulary(config.per_layer_vocab_size, width, tp, ops)
        self.per_layer_model_projection = Linear(
            config.hidden_size, {"per_layer_model_projection": width}, tp, ops, split=None
        )
        self.per_layer_projection_norm = build_norm(config, size, ops)

    def forward(self, token_ids_T: torch.Tensor, embeddings_TD: torch.Tensor) -> torch.Tensor:
        """[L, T, P]. `embeddings_TD` enter the first layer."""
        tokens = len(token_ids_T)
        own_TX = self.embed_tokens_per_layer.embed(token_ids_T)
        own_TX.mul_(torch.tensor(self.size**0.5, dtype=own_TX.dtype).item())
        projected_TX = self.per_layer_model_projection(embeddings_TD).mul_(self.shrink)
        normed = self.per_layer_projection_norm(projected_TX.view(-1, self.size))
        summed = normed.view(tokens, -1, self.size).add_(own_TX.view(tokens, -1, self.size))
        return summed.mul_(2**-0.5).transpose(0, 1).contiguous()


class PerLayerInput(nn.Module):
    """residual += norm(projection(gelu(gate(residual)) * the layer's embedding)). It is whole on every
    rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops, size, hidden = ops, config.per_layer_size, config.hidden_size
        self.activation = config.activation
        self.per_layer_input_gate = Linear(hidden, {"per_layer_input_gate": size}, tp, ops, split=None)
        self.per_layer_projection = Linear(size, {"per_layer_projection": hidden}, tp, ops, split=None)
        self.post_per_layer_input_norm = build_norm(config, hidden, ops)

    def forward(self, residual_TD: torch.Tensor, embeddings_TP: torch.Tensor) -> torch.Tensor:
        """Returns what is to be normed and added."""
        gate_TP = self.per_layer_input_gate(residual_TD)
        gated_TP = self.ops.gate_mul(torch.cat((gate_TP, embeddings_TP), dim=1), self.activation)
        return self.per_layer_projection(gated_TP)
