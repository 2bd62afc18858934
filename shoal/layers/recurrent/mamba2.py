"""Mamba2: a Mamba-2 layer in the place of attention (Dao & Gu 2024). One matmul of the norm of the residual
makes the gate z, x, B, C and each head's dt. A short convolution runs over x, B and C; the state space reads
and writes the state; its result is gated by z, normed in groups, and goes through the output matmul."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.mixers import MambaWeights, mamba_in_parts
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kinds.recurrent import Mamba2Kind
from shoal.layers.head_numbers import HeadNumbers
from shoal.layers.layer_step import StateStep, Stream
from shoal.layers.linear import Linear, output_linear
from shoal.layers.loading import CheckpointTensor
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.recurrent.conv import ConvWeights, sequences_of
from shoal.model_config import ModelConfig


class InnerNorm(HeadNumbers):
    """The weights of the norm after the gate: one for each number of this rank's heads."""

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        return super().checkpoint_tensors(f"{path}.weight")


class Mamba2(nn.Module):
    """Shapes: T tokens, D hidden, C channels of x, B and C, H heads on this rank, P numbers of all of them, G
    groups of the model."""

    def __init__(self, config: ModelConfig, kind: Mamba2Kind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops, self.kind, self.tp, self.eps = ops, kind, tp, config.rms_norm_eps
        inner, heads, groups = kind.inner_size, kind.num_heads, kind.num_groups * kind.state_size
        replicas = max(1, tp.size // kind.num_groups)
        shared = kind.groups_per_rank(tp.size) * kind.state_size
        self.sizes = [inner // tp.size, shared, shared]
        self.in_proj = Linear(
            config.hidden_size,
            {
                "in_proj_z": inner,
                "in_proj_x": inner,
                "in_proj_b": groups,
                "in_proj_c": groups,
                "in_proj_dt": heads,
            },
            tp,
            ops,
            split="columns",
            bias=kind.bias,
            replicas=(1, 1, replicas, replicas, 1),
        )
        self.conv1d = ConvWeights(
            (inner, groups, groups), kind.conv_width, tp, kind.conv_bias, (1, replicas, replicas)
        )
        self.A_log, self.D, self.dt_bias = (HeadNumbers(heads, tp) for _ in range(3))
        self.norm = InnerNorm(inner, tp)
        self.out_proj = output_linear(config, "out_proj", inner, tp, ops, kind.bias)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: StateStep
    ) -> Stream:
        """Takes and returns what Attention.forward does; `step.memory` is the layer's state."""
        projected, residual = norm.add_linear(x_TD, residual_TD, self.in_proj)
        z_TP, mixed_TC, dt_TH = projected.split(
            (self.sizes[0], sum(self.sizes), len(self.A_log.values_H)), dim=1
        )
        weights, memory, sequences = self._weights(), step.memory, sequences_of(step)
        if self.kind.num_groups % self.tp.size == 0:
            gated_TP = self.ops.mamba_mixer(mixed_TC, z_TP, dt_TH, weights, memory, sequences)
        else:
            parts = self.ops.causal_conv, self.ops.mamba2, self._norm_over_ranks
            gated_TP = mamba_in_parts(parts, mixed_TC, z_TP, dt_TH, weights, memory, sequences)
        return self.out_proj.add_selected(gated_TP, residual, step.select_S)

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies pending inputs to the states of these sequences, which have no tokens of their own."""
        sizes = sum(self.sizes), self.sizes[0], len(self.A_log.values_H)
        xbc_TC, z_TP, dt_TH = (memory.conv_RCW.new_empty(0, size) for size in sizes)
        self.ops.mamba_mixer(xbc_TC, z_TP, dt_TH, self._weights(), memory, sequences)

    def _weights(self) -> MambaWeights:
        return MambaWeights(
            self.conv1d.weight_CW,
            self.conv1d.bias_C,
            self.A_log.values_H,
            self.D.values_H,
            self.dt_bias.values_H,
            (self.kind.least_dt, self.kind.most_dt),
            self.norm.values_H,
            self.eps,
        )

    def _norm_over_ranks(
        self,
        out_TP: torch.Tensor,
        z_TP: torch.Tensor,
        weight_P: torch.Tensor,
        eps: float,
        size: int,
        gate_first: bool,
    ) -> torch.Tensor:
        """As the op gated_norm, for a group that several ranks share."""
        assert gate_first
        num_groups = self.kind.num_groups
        group = self.tp.rank * num_groups // self.tp.size
        gated_TP = out_TP.float() * F.silu(z_TP.float())
        squares_TG = torch.zeros(len(out_TP), num_groups, dtype=torch.float32, device=out_TP.device)
        squares_TG[:, group] = gated_TP.square().sum(1)
        mean_T1 = self.tp.all_reduce(squares_TG)[:, group : group + 1] / (self.kind.inner_size // num_groups)
        return ((gated_TP * torch.rsqrt(mean_T1 + eps)).to(out_TP.dtype) * weight_P).to(out_TP.dtype)
