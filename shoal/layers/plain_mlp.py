"""PlainMLP: an MLP without a gate, of the square of relu (Nemotron-H). It takes and returns what an MLP does
(mlp.py)."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class PlainMLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up_proj = Linear(hidden, {"up_proj": size}, tp, ops, split="columns", bias=bias)
        self.down_proj = Linear(size, {"down_proj": hidden}, tp, ops, split="rows", bias=bias)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        up_TF, residual_TD = norm.add_linear(x_TD, residual_TD, self.up_proj)
        return self.down_proj.add_to(up_TF.relu_().square_(), residual_TD), residual_TD

    def part(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the result for the normed input."""
        bias = self.down_proj.bias if self.down_proj.tp.rank == 0 else None
        return self.down_proj.format.matmul(self.up_proj(x_TD).relu_().square_(), bias)
