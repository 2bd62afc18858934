"""DeltaNet: a gated delta net in the place of attention (Qwen3-Next, Yang 2024). A matmul of the norm of the
residual makes q, k, v and the gate z, and a small one the numbers b and a of each head. A short convolution
runs over q, k and v; the delta rule reads and writes the state; each head of its result is normed, and gated
by z."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.mixers import DeltaWeights
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kinds.recurrent import DeltaKind
from shoal.layers.conv import ConvWeights, sequences_of
from shoal.layers.head_numbers import HeadNumbers
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class DeltaNet(nn.Module):
    """Shapes: T tokens, D hidden, C channels of q, k and v, H value heads, X numbers of all of them."""

    def __init__(self, config: ModelConfig, kind: DeltaKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.sizes = [size // tp.size for size in kind.part_sizes]
        q, k, v = kind.part_sizes
        self.in_proj_qkvz = Linear(
            config.hidden_size,
            {"in_proj_q": q, "in_proj_k": k, "in_proj_v": v, "in_proj_z": v},
            tp,
            ops,
            split="columns",
        )
        heads = kind.num_value_heads
        self.in_proj_ba = Linear(
            config.hidden_size, {"in_proj_b": heads, "in_proj_a": heads}, tp, ops, split="columns"
        )
        self.conv1d = ConvWeights(kind.part_sizes, kind.conv_width, tp, bias=False)
        self.A_log, self.dt_bias = HeadNumbers(heads, tp), HeadNumbers(heads, tp)
        self.norm = RMSNorm(kind.value_dim, config.rms_norm_eps, ops)
        self.out_proj = Linear(
            v, {"out_proj": config.hidden_size}, tp, ops, split="rows", multiplier=config.residual_multiplier
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
        normed_TD = norm.add(x_TD, residual_TD)
        qkvz, (b_TH, a_TH) = self.in_proj_qkvz(normed_TD), self.in_proj_ba(normed_TD).chunk(2, dim=1)
        qkv_TC, z_TX = qkvz.split((sum(self.sizes), self.sizes[2]), dim=1)
        inputs = qkv_TC, z_TX, a_TH, b_TH
        gated_TX = self.ops.delta_mixer(*inputs, self._weights(), memory, sequences_of(step, memory))
        if select_S is None:
            return self.out_proj.add_to(gated_TX, residual_TD), residual_TD
        residual_SD = residual_TD[select_S]
        if len(select_S) == 0:
            return None, residual_SD
        return self.out_proj.add_to(gated_TX[select_S], residual_SD), residual_SD

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies the kept inputs of sequences, which have no tokens, to their states."""
        sizes = sum(self.sizes), self.sizes[2], len(self.A_log.values_H)
        qkv_TC, z_TX, a_TH = (memory.conv_RCW.new_empty(0, size) for size in sizes)
        self.ops.delta_mixer(qkv_TC, z_TX, a_TH, a_TH, self._weights(), memory, sequences)

    def _weights(self) -> DeltaWeights:
        conv_CW, norm = self.conv1d.weight_CW, self.norm
        return DeltaWeights(conv_CW, self.A_log.values_H, self.dt_bias.values_H, norm.weight, norm.eps)
