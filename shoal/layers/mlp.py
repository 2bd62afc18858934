"""The feed-forward half of a dense layer: the norm of the residual, then a gated MLP (Shazeer 2020).

It takes what is to be added to the residual (None: nothing), and returns what the next layer has to add, and
the new residual. On several ranks what is to be added is each rank's part of a sum.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear, output_linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        size, self.activation = config.intermediate_size, config.activation
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            tp,
            ops,
            split="columns",
            bias=config.mlp_bias,
        )
        self.down_proj = output_linear(config, "down_proj", size, tp, ops, config.mlp_bias)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden_TF, residual_TD = norm.add_linear(
            x_TD, residual_TD, self.gate_up_proj, activation=self.activation, reader=self.down_proj
        )
        return self.down_proj.add_to(hidden_TF, residual_TD), residual_TD

    def whole(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """Returns the result for the normed input, summed over the ranks."""
        return self.down_proj(self.gate_up_proj.gated(normed_TD, self.activation, self.down_proj))
