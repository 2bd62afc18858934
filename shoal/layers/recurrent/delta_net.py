"""DeltaNet: a gated delta net in the place of attention (Qwen3-Next, Yang 2024). A matmul of the norm of the
residual makes q, k, v and the gate z, and a small one the numbers b and a of each head. A short convolution
runs over q, k and v; the delta rule reads and writes the state; each head of its result is normed, and gated
by z. KimiDelta: the same with gates of channels."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.mixers import DeltaWeights
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kinds.recurrent import ChannelDeltaKind, DeltaKind
from shoal.layers.head_numbers import HeadNumbers
from shoal.layers.layer_step import StateStep, Stream
from shoal.layers.linear import Linear, output_linear
from shoal.layers.norm import RMSNorm
from shoal.layers.norm_kinds import FloatNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.recurrent.conv import ConvWeights, sequences_of
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
        self.out_proj = output_linear(config, "out_proj", v, tp, ops)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: StateStep
    ) -> Stream:
        """Takes and returns what Attention.forward does; `step.memory` is the layer's state."""
        normed_TD = norm.add(x_TD, residual_TD)
        qkvz, (b_TH, a_TH) = self.in_proj_qkvz(normed_TD), self.in_proj_ba(normed_TD).chunk(2, dim=1)
        qkv_TC, z_TX = qkvz.split((sum(self.sizes), self.sizes[2]), dim=1)
        inputs = qkv_TC, z_TX, a_TH, b_TH
        gated_TX = self.ops.delta_mixer(*inputs, self._weights(), step.memory, sequences_of(step))
        return self.out_proj.add_selected(gated_TX, residual_TD, step.select_S)

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies pending inputs to the states of these sequences, which have no tokens of their own."""
        sizes = sum(self.sizes), self.sizes[2], len(self.A_log.values_H)
        qkv_TC, z_TX, a_TH = (memory.conv_RCW.new_empty(0, size) for size in sizes)
        self.ops.delta_mixer(qkv_TC, z_TX, a_TH, a_TH, self._weights(), memory, sequences)

    def _weights(self) -> DeltaWeights:
        conv_CW, norm = self.conv1d.weight_CW, self.norm
        return DeltaWeights(conv_CW, self.A_log.values_H, self.dt_bias.values_H, norm.weight, norm.eps)


class KimiDelta(nn.Module):
    """Kimi Delta Attention, in which each channel of a key forgets by a gate of its own (Kimi Linear). A
    second matmul makes b and two vectors of low rank, from which two matrices make the gates of forgetting
    and of the result, which is multiplied by the sigmoid of its gate.

    Shapes: T tokens, D hidden, C channels of q, k and v, H heads on this rank, N numbers of a key, V of a
    value, X of all heads' values, R the rank of the gates."""

    def __init__(self, config: ModelConfig, kind: ChannelDeltaKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops, self.kind = ops, kind
        self.sizes = [size // tp.size for size in kind.part_sizes]
        (q, k, v), heads, rank = kind.part_sizes, kind.num_value_heads, kind.gate_rank
        hidden = config.hidden_size
        self.qkv_proj = Linear(hidden, {"q_proj": q, "k_proj": k, "v_proj": v}, tp, ops, split="columns")
        self.low_proj = Linear(
            hidden,
            {"f_a_proj": rank, "g_a_proj": rank, "b_proj": heads},
            tp,
            ops,
            split="columns",
            replicas=(tp.size, tp.size, 1),
        )
        self.f_b_proj = Linear(rank, {"f_b_proj": k}, tp, ops, split="columns")
        self.g_b_proj = Linear(rank, {"g_b_proj": v}, tp, ops, split="columns")
        names = ("q_conv1d", "k_conv1d", "v_conv1d")
        self.conv1d = ConvWeights(kind.part_sizes, kind.conv_width, tp, bias=False, names=names)
        self.A_log = HeadNumbers(heads, tp, shape=(1, 1, heads, 1))
        self.dt_bias = HeadNumbers(k, tp)
        self.o_norm = FloatNorm(kind.value_dim, config.rms_norm_eps, ops)
        self.o_proj = output_linear(config, "o_proj", v, tp, ops)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: StateStep
    ) -> Stream:
        """Takes and returns what Attention.forward does; `step.memory` is the layer's state."""
        normed_TD, rank = norm.add(x_TD, residual_TD), self.kind.gate_rank
        f_TR, g_TR, b_TH = self.low_proj(normed_TD).split((rank, rank, len(self.A_log.values_H)), dim=1)
        memory, select_S, sequences = step.memory, step.select_S, sequences_of(step)
        out_TX = self._rule(
            self.qkv_proj(normed_TD), self.f_b_proj(f_TR.contiguous()), b_TH, memory, sequences
        )
        residual, g = residual_TD, g_TR
        if select_S is not None:
            if len(select_S) == 0:
                return None, residual_TD[:0]
            out_TX, g, residual = out_TX[select_S], g[select_S], residual[select_S]
        gated = self.ops.gated_norm(
            out_TX,
            self.g_b_proj(g.contiguous()),
            self.o_norm.weight,
            self.o_norm.eps,
            self.kind.value_dim,
            gate_first=False,
            activation="sigmoid",
        )
        return self.o_proj.add_to(gated, residual), residual

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies pending inputs to the states of these sequences, which have no tokens of their own."""
        sizes = sum(self.sizes), self.sizes[1], len(self.A_log.values_H)
        qkv_TC, gates_TX, b_TH = (memory.conv_RCW.new_empty(0, size) for size in sizes)
        self._rule(qkv_TC, gates_TX, b_TH, memory, sequences)

    def _rule(
        self,
        qkv_TC: torch.Tensor,
        gates_TX: torch.Tensor,
        b_TH: torch.Tensor,
        memory: LayerState,
        sequences: Sequences,
    ) -> torch.Tensor:
        """Returns the outputs of the delta rule, [T, X]."""
        assert memory.state_R is not None
        size, columns = self.kind.key_dim, self.kind.value_dim
        mixed_TC = self.ops.causal_conv(
            qkv_TC, self.conv1d.weight_CW, None, True, memory.conv_RCW, sequences, memory.kept_conv_RKC
        )
        q, k, v = mixed_TC.split(self.sizes, dim=1)
        out_THV = self.ops.gated_delta(
            q.unflatten(1, (-1, size)),
            k.unflatten(1, (-1, size)),
            v.unflatten(1, (-1, columns)),
            gates_TX.unflatten(1, (-1, size)),
            b_TH,
            self.A_log.values_H,
            self.dt_bias.values_H.view(-1, size),
            memory.state_R,
            sequences,
            memory.kept_state_RKX,
        )
        return out_THV.flatten(1)
