"""Llama4Layer: Llama's decoder layer in which an expert's score multiplies its input, and not its output."""

from __future__ import annotations

import torch

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.experts import MoE
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.decoder_layers.decoder_layer import DecoderLayer


class Llama4MoE(MoE):
    """A token has one expert, so that its input can be scaled before the expert is chosen, with a weight of
    1. The shared expert's is not scaled, so it stays apart."""

    joins = False

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, adds = norm.add(x_TD, residual_TD), self.tp.size == 1
        left_TD, logits_TE = self._share(normed_TD, residual_TD), self.gate(normed_TD)
        score_T1 = torch.sigmoid(logits_TE.amax(dim=1, keepdim=True).float()).to(normed_TD.dtype)
        out_TD = self.experts.mix(normed_TD * score_T1, logits_TE, residual_TD if adds else None)
        if adds:
            return left_TD, residual_TD
        return out_TD if left_TD is None else out_TD.add_(left_TD), residual_TD


class Llama4Layer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(config, kind, tp, ops, backends)
        if kind.experts is not None:
            self.mlp = Llama4MoE(config, kind.experts, tp, ops)
