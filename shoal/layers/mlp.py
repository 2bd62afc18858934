"""The feed-forward half of a layer: the norm of the residual, then SwiGLU (Shazeer 2020), dense or as a
mixture of experts.

Both kinds take what is to be added to the residual (None: nothing). They return what the next layer has to
add, and the new residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into, narrow
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            tp,
            ops,
            split="columns",
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(
            size,
            {"down_proj": config.hidden_size},
            tp,
            ops,
            split="rows",
            bias=config.mlp_bias,
            multiplier=config.residual_multiplier,
        )

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden_TF, residual_TD = norm.add_linear(
            x_TD, residual_TD, self.gate_up_proj, silu_mul=True, reader=self.down_proj
        )
        return self.down_proj.add_to(hidden_TF, residual_TD), residual_TD


class Experts(LoadingLayer):
    """The weights of all experts in two tensors: w13 [E, 2F, D] (gate, then up) and w2 [E, D, F]. F is
    divided over the ranks."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.num_experts = tp, config.num_experts
        self.hidden, self.full = config.hidden_size, config.moe_intermediate_size
        self.shard = self.full // tp.size
        self.w13 = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.shard, self.hidden), requires_grad=False
        )
        self.w2 = nn.Parameter(torch.empty(self.num_experts, self.hidden, self.shard), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        wide, tall = (self.full, self.hidden), (self.hidden, self.full)
        for e in range(self.num_experts):
            own = f"{path}.{e}"
            yield CheckpointTensor(f"{own}.gate_proj.weight", wide, partial(self._load_half, e, 0))
            yield CheckpointTensor(f"{own}.up_proj.weight", wide, partial(self._load_half, e, 1))
            yield CheckpointTensor(f"{own}.down_proj.weight", tall, partial(self._load_down, e))

    def _load_half(self, expert: int, half: int, tensor: Loaded, name: str) -> None:
        """Loads this rank's part of an expert's gate (`half` 0) or up (`half` 1) into w13."""
        check_shape(name, tuple(tensor.shape), (self.full, self.hidden))
        target = self.w13[expert].narrow(0, half * self.shard, self.shard)
        copy_into(target, narrow(tensor, 0, self.tp.rank * self.shard, self.shard), name)

    def _load_down(self, expert: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.hidden, self.full))
        copy_into(self.w2[expert], narrow(tensor, 1, self.tp.rank * self.shard, self.shard), name)


class MoE(nn.Module):
    """A softmax router picks the best `top_k` experts of each token; their outputs are summed by its
    weights."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        assert config.residual_multiplier == 1.0, "the experts' kernel adds to the residual as it is"
        self.ops, self.tp = ops, tp
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, {"gate": config.num_experts}, tp, ops, split=None)
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
