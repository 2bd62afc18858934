"""ShortConv: a gated short convolution in the place of attention (LFM2). One matmul makes b, c and x of the
norm of the residual; b * x goes through a causal convolution, and the result times c into the output
matmul."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.ops import Ops
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kinds.recurrent import ShortConvKind
from shoal.layers.layer_step import StateStep, Stream
from shoal.layers.linear import Linear, output_linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.recurrent.conv import ConvWeights, sequences_of
from shoal.model_config import ModelConfig


class ShortConv(nn.Module):
    """Shapes: T tokens, D hidden, C channels on this rank."""

    def __init__(self, config: ModelConfig, kind: ShortConvKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.ops, size = ops, kind.size
        self.in_proj = Linear(
            config.hidden_size,
            {"in_proj_b": size, "in_proj_c": size, "in_proj_x": size},
            tp,
            ops,
            split="columns",
            bias=kind.bias,
        )
        self.conv = ConvWeights((size,), kind.conv_width, tp, kind.bias)
        self.out_proj = output_linear(config, "out_proj", size, tp, ops, kind.bias)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: StateStep
    ) -> Stream:
        """Takes and returns what Attention.forward does; `step.memory` is the layer's state."""
        bcx, residual = norm.add_linear(x_TD, residual_TD, self.in_proj)
        b_TC, c_TC, x_TC = bcx.chunk(3, dim=1)
        mixed_TC = self._mixed(b_TC * x_TC, step.memory, sequences_of(step))
        select_S = step.select_S
        if select_S is not None:
            if len(select_S) == 0:
                return None, residual[:0]
            mixed_TC, c_TC, residual = mixed_TC[select_S], c_TC[select_S], residual[select_S]
        return self.out_proj.add_to(mixed_TC * c_TC, residual), residual

    def apply_pending(self, memory: LayerState, sequences: Sequences) -> None:
        """Applies pending inputs to the states of these sequences, which have no tokens of their own."""
        self._mixed(memory.conv_RCW.new_empty(0, self.conv.weight_CW.shape[0]), memory, sequences)

    def _mixed(self, bx_TC: torch.Tensor, memory: LayerState, sequences: Sequences) -> torch.Tensor:
        weight_CW, bias_C = self.conv.weight_CW, self.conv.bias_C
        return self.ops.causal_conv(
            bx_TC, weight_CW, bias_C, False, memory.conv_RCW, sequences, memory.kept_conv_RKC
        )
