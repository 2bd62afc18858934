"""HunyuanLayer: Llama's decoder layer with norms of q and k after the rotation. The fused pass norms first,
so q and k are rotated before it."""

from __future__ import annotations

import torch

from shoal.layers.attention import Attention
from shoal.layers.layer_step import CacheStep, Stream
from shoal.models.decoder_layers.decoder_layer import DecoderLayer


class HunyuanAttention(Attention):
    def attend(self, qkv: torch.Tensor, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes and returns what Attention.attend does."""
        assert step.cos_sin is not None
        h, g, n = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qk_THN = qkv.view(-1, h + 2 * g, n)[:, : h + g]
        cos, sin = step.cos_sin[step.input.positions_T.long().clamp(min=0)].unsqueeze(1).chunk(2, dim=-1)
        first, second = qk_THN.float().chunk(2, dim=-1)
        qk_THN.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        return super().attend(qkv, residual_TD, step._replace(cos_sin=None))


class HunyuanLayer(DecoderLayer):
    attention_class = HunyuanAttention
