"""The feed-forward half of a layer: the norm of the sum with the residual, then SwiGLU (Shazeer 2020), dense
or as a mixture of experts.

Both kinds take what is to be added to the residual (None: nothing), and return what the next layer has to
add, and the residual.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear, Loaded, check_shape, copy_into, narrow
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops, keep_quantized: bool) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size,
            (size, size),
            tp,
            ops,
            split="columns",
            bias=config.mlp_bias,
            keep_quantized=keep_quantized,
        )
        self.down_proj = Linear(
            size,
            (config.hidden_size,),
            tp,
            ops,
            split="rows",
            bias=config.mlp_bias,
            keep_quantized=keep_quantized,
        )

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden_TF, residual_TD = norm.add_linear(x_TD, residual_TD, self.gate_up_proj, silu_mul=True)
        return self.down_proj.add_to(hidden_TF, residual_TD), residual_TD


class Experts(nn.Module):
    """All experts' weights in two tensors: w13 [E, 2F, D] (gate, then up) and w2 [E, D, F]; F is divided over
    the ranks."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.num_experts = tp, config.num_experts
        self.full = config.moe_intermediate_size
        self.shard = self.full // tp.size
        self.w13 = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.shard, config.hidden_size), requires_grad=False
        )
        self.w2 = nn.Parameter(
            torch.empty(self.num_experts, config.hidden_size, self.shard), requires_grad=False
        )

    def load_expert(self, projection: str, expert: int, tensor: Loaded, name: str) -> None:
        """One expert's gate_proj, up_proj or down_proj, whole."""
        hidden = self.w2.shape[1]
        check_shape(
            name,
            tuple(tensor.shape),
            (hidden, self.full) if projection == "down_proj" else (self.full, hidden),
        )
        start = self.tp.rank * self.shard
        if projection == "down_proj":
            copy_into(self.w2[expert], narrow(tensor, 1, start, self.shard), name)
        elif projection in ("gate_proj", "up_proj"):
            half = self.w13[expert].narrow(0, self.shard if projection == "up_proj" else 0, self.shard)
            copy_into(half, narrow(tensor, 0, start, self.shard), name)
        else:
            raise CheckpointError(
                f"{name}: an expert has gate_proj, up_proj and down_proj, not {projection!r}"
            )


class MoE(nn.Module):
    """Softmax router, the best `top_k` experts a token, weighted sum."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops, self.tp = ops, tp
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, (config.num_experts,), tp, ops, split=None)
        self.experts = Experts(config, tp)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, alone = norm.add(x_TD, residual_TD), self.tp.size == 1
        out_TD = self.ops.moe(
            normed_TD,
            self.gate(normed_TD),
            self.experts.w13,
            self.experts.w2,
            self.top_k,
            self.norm_topk_prob,
            residual_TD if alone else None,
        )
        return None if alone else self.tp.all_reduce(out_TD), residual_TD
