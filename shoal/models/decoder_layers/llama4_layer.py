"""Llama4Layer: Llama's decoder layer in which an expert's score multiplies its input, and not its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.kinds.experts import ExpertsKind
from shoal.layers.experts import MoE
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.decoder_layers.decoder_layer import DecoderLayer


class Llama4MoE(MoE):
    """A token's input is scaled before an expert gets it, with a weight of 1; each of a token's experts is a
    pass of its own, and published models have one. The shared expert's input is not scaled, so it stays
    apart."""

    joins = False

    def __init__(self, config: ModelConfig, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__(config, replace(kind, router=replace(kind.router, top_k=1)), tp, ops)
        self.top_k = kind.router.top_k

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, adds = norm.add(x_TD, residual_TD), self.tp.size == 1
        left_TD, logits_TE = self._share(normed_TD, residual_TD), self.gate(normed_TD)
        for best_T1, own_TE in self._passes(logits_TE):
            scaled_TD = normed_TD * torch.sigmoid(best_T1.float()).to(normed_TD.dtype)
            out_TD = self.experts.mix(scaled_TD, own_TE, residual_TD if adds else None)
            if not adds:
                left_TD = out_TD if left_TD is None else out_TD.add_(left_TD)
        return left_TD, residual_TD

    def _passes(self, logits_TE: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields, expert by expert of a token, its logit and logits among which that is the largest."""
        if self.top_k == 1:
            yield logits_TE.amax(dim=1, keepdim=True), logits_TE
            return
        best_TK, experts_TK = logits_TE.topk(self.top_k, dim=1)
        for best_T1, expert_T1 in zip(best_TK.split(1, dim=1), experts_TK.split(1, dim=1)):
            others_TE = torch.full_like(logits_TE, float("-inf"))
            yield best_T1, others_TE.scatter(1, expert_T1, best_T1)


class Llama4Layer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(config, kind, tp, ops, backends)
        if kind.experts is not None:
            self.mlp = Llama4MoE(config, kind.experts, tp, ops)
