"""WidthNormLayer: a layer of the Llama line that norms all heads of q, and of k, together."""

from __future__ import annotations

import torch

from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.norm import RMSNorm
from shoal.models.decoder_layers.decoder_layer import DecoderLayer
from shoal.models.decoder_layers.olmo2_layer import Olmo2Attention


class WidthNormAttention(Olmo2Attention):
    """Olmo2Attention after a norm."""

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: CacheStep
    ) -> Stream:
        """Takes and returns what Attention.forward does."""
        qkv, residual_TD = norm.add_linear(x_TD, residual_TD, self.qkv_proj)
        out, residual = self.attend(self.normed(qkv), residual_TD, step)
        return (None if out is None else self.o_proj.add_to(out, residual)), residual


class WidthNormLayer(DecoderLayer):
    attention_class = WidthNormAttention
