"""`MtpHead`: the head for multi-token prediction that a model was trained with (DeepSeek-V3, 2024). It joins
the embedding of a token and the target's final hidden state of the token before it, runs layers like the
target's, and begins the next draft with its own output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.ops import Ops
from shoal.layers.embedding import Vocabulary
from shoal.layers.keeping import keep_matrices
from shoal.layers.layer_step import LayerStep
from shoal.layers.linear import Linear
from shoal.layers.matrix import Holding
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder, build_layer
from shoal.models.heads.head import DraftHead


class MtpHead(DraftHead):
    """Its weights stay quantized as the target's do."""

    def __init__(
        self,
        config: ModelConfig,
        target: Decoder,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        own: Collection[str],
        quantizes: bool = False,
        holding: Holding = nullcontext,
    ) -> None:
        """`config`: the target's config, with the head's layers. `own`: the modules that the head has itself,
        of `norm`, `embed_tokens` and `lm_head`. It shares the others with the target."""
        super().__init__(config.layers)
        self.config = config
        self._target = [target]  # in a list, so that it counts as no module of the head
        size, device = config.hidden_size, torch.get_default_device()
        with torch.device("meta") if target.keep_quantized else nullcontext():
            self.embedding_norm, self.hidden_norm = (build_norm(config, size, ops) for _ in range(2))
            self.fc = Linear(2 * size, {"fc": size}, tp, ops, split=None)
            self.layers = nn.ModuleList(
                build_layer(config, kind, tp, ops, backends) for kind in config.layers
            )
            self.norm = build_norm(config, size, ops, tp) if "norm" in own else None
            self.embed_tokens, self.lm_head = (
                Vocabulary(config.vocab_size, size, tp, ops) if name in own else None
                for name in ("embed_tokens", "lm_head")
            )
        if target.keep_quantized:
            keep_matrices(self, device, quantizes, holding)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        step: StepInput,
        caches: Sequence[LayerCache],
        select_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        [target] = self._target
        embedded_TD = (self.embed_tokens or target.embed_tokens).embed(token_ids_T)
        pair = torch.cat((self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)), dim=1)
        x, residual = None, self.fc(pair)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            layer_step = LayerStep(step, caches[i], self.ropes[i], select_S if i == last else None)
            x, residual = layer(x, residual, layer_step)
        normed = (self.norm or target.norm).add(x, residual)
        return normed, normed

    def logits(self, normed_SD: torch.Tensor) -> torch.Tensor:
        [target] = self._target
        if self.lm_head is not None:
            return self.lm_head.whole(self.lm_head.logits(normed_SD))
        return target.lm_head.whole(target.logits(normed_SD))
