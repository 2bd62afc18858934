"""PlainMoE: a mixture of experts without gates (Nemotron-H), which may compute in fewer numbers than hidden
states have. It takes and returns what an MLP does (mlp.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kinds.experts import ExpertsKind
from shoal.layers.experts import Experts, RouterLayer
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.plain_mlp import PlainMLP
from shoal.model_config import ModelConfig


class PlainMoE(nn.Module):
    """The router and the shared expert see the hidden states; with a latent size the other experts see a
    projection of them, and their sum is projected back. Each rank has a part of that sum, so projections are
    whole on all ranks."""

    def __init__(self, config: ModelConfig, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, kind.latent_size
        self.gate = RouterLayer(hidden, kind, tp, ops)
        self.experts = Experts(latent or hidden, kind, tp, ops)
        self.fc1_latent_proj = self.fc2_latent_proj = self.shared_experts = None
        if latent is not None:
            self.fc1_latent_proj = Linear(hidden, {"fc1_latent_proj": latent}, tp, ops, split=None)
            self.fc2_latent_proj = Linear(latent, {"fc2_latent_proj": hidden}, tp, ops, split=None)
        if kind.shared is not None:
            own = replace(config, intermediate_size=kind.shared.intermediate_size)
            self.shared_experts = PlainMLP(own, tp, ops)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD = norm.add(x_TD, residual_TD)
        logits_TE, tensors = self.gate(normed_TD), self.gate.rule_tensors
        inner = normed_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(normed_TD)
        out_TD = self.experts.mix(inner, logits_TE, None, tensors)
        if self.fc2_latent_proj is not None:
            out_TD = self.fc2_latent_proj(out_TD)
        if self.shared_experts is not None:
            out_TD = out_TD.add_(self.shared_experts.part(normed_TD))
        return out_TD, residual_TD
