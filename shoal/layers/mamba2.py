"""Mamba2: a Mamba-2 layer in the place of attention (Dao & Gu 2024). One matmul of the norm of the residual
makes the gate z, x, B, C and each head's dt. A short convolution runs over x, B and C; the state space reads
and writes the state; its result is gated by z, normed in groups, and goes through the output matmul."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kinds.recurrent import Mamba2Kind
from shoal.layers.conv import ConvWeights, sequences_of
from shoal.layers.head_numbers import HeadNumbers
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class InnerNorm(HeadNumbers):
    """The weights of the norm behind the gate: one for each number of this rank's heads."""

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
        self.out_proj = Linear(
            inner,
            {"out_proj": config.hidden_size},
            tp,
            ops,
            split="rows",
            bias=kind.bias,
            multiplier=config.residual_multiplier,
        )

    def forward(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        norm: RMSNorm,
        step: StepInput,
        memory: LayerState,
        cos_sin: torch.Tensor | None,
        select_S: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Takes and returns what Attention.forward does; `memory` is the layer's state."""
        assert memory.state_R is not None
        kind = self.kind
        projected, residual = norm.add_linear(x_TD, residual_TD, self.in_proj)
        z, mixed_TC, dt_TH = projected.split(
            (self.sizes[0], sum(self.sizes), len(self.A_log.values_H)), dim=1
        )
        sequences = sequences_of(step)
        mixed_TC = self.ops.causal_conv(
            mixed_TC, self.conv1d.weight_CW, self.conv1d.bias_C, True, memory.conv_RCW, sequences
        )
        x, b, c = mixed_TC.split(self.sizes, dim=1)
        out_THV = self.ops.mamba2(
            x.unflatten(1, (-1, kind.head_dim)),
            dt_TH,
            b.unflatten(1, (-1, kind.state_size)),
            c.unflatten(1, (-1, kind.state_size)),
            self.A_log.values_H,
            self.D.values_H,
            self.dt_bias.values_H,
            (kind.least_dt, kind.most_dt),
            memory.state_R,
            sequences,
        )
        out = out_THV.flatten(1)
        if select_S is not None:
            if len(select_S) == 0:
                return None, residual[:0]
            out, z, residual = out[select_S], z[select_S], residual[select_S]
        return self.out_proj.add_to(self._normed(out, z), residual), residual

    def _normed(self, out_TP: torch.Tensor, z_TP: torch.Tensor) -> torch.Tensor:
        """Gates and norms. A group that several ranks share is normed as one."""
        num_groups, size = self.kind.num_groups, self.kind.inner_size // self.kind.num_groups
        weight_P = self.norm.values_H
        if num_groups % self.tp.size == 0:
            return self.ops.gated_norm(out_TP, z_TP, weight_P, self.eps, size, gate_first=True)
        group = self.tp.rank * num_groups // self.tp.size
        gated_TP = out_TP.float() * F.silu(z_TP.float())
        squares_TG = torch.zeros(len(out_TP), num_groups, device=out_TP.device)
        squares_TG[:, group] = gated_TP.square().sum(1)
        mean_T1 = self.tp.all_reduce(squares_TG)[:, group : group + 1] / size
        return ((gated_TP * torch.rsqrt(mean_T1 + self.eps)).to(out_TP.dtype) * weight_P).to(out_TP.dtype)
