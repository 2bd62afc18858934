"""Olmo2Layer: the decoder layer of OLMo 2. No fused kernel sums and norms in its order, so plain ones do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.attention import Attention
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, copy_into, narrow
from shoal.layers.mlp import MLP
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, LayerKind, ModelConfig


class WidthNorm(RMSNorm):
    """RMSNorm over all heads of q or of k together; this rank holds the weights of its own
    heads. `replicas` ranks hold the same heads."""

    def __init__(self, width: int, replicas: int, eps: float, tp: TensorParallel, ops: Ops) -> None:
        super().__init__(width * replicas // tp.size, eps, ops)
        self.width, self.replicas = width, replicas
        self.shard, self.first = len(self.weight), tp.rank // replicas * len(self.weight)

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", (self.width,), self._load_shard)

    def _load_shard(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.width,))
        copy_into(self.weight, narrow(tensor, 0, self.first, self.shard), name)


class Olmo2Attention(Attention):
    """Shapes: T tokens, X = (H + 2G) * N for this rank's H query heads and G kv heads of size N."""

    q_norm: WidthNorm
    k_norm: WidthNorm

    def __init__(
        self, config: ModelConfig, kind: AttentionKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(config, kind, tp, ops, backends)
        self.tp = tp
        n, eps, replicas = kind.head_dim, config.rms_norm_eps, kind.kv_head_replicas(tp.size)
        self.q_norm = WidthNorm(kind.num_heads * n, 1, eps, tp, ops)
        self.k_norm = WidthNorm(kind.num_kv_heads * n, replicas, eps, tp, ops)

    def head_norms(self) -> tuple[None, None]:
        """None: q and k are normed before the fused pass."""
        return None, None

    def normed(self, qkv_TX: torch.Tensor) -> torch.Tensor:
        """Norms q and k in place."""
        norms = self.q_norm, self.k_norm
        shards = norms[0].shard, norms[1].shard, norms[1].shard
        parts = qkv_TX.split(shards, dim=1)[:2]
        if self.tp.size == 1:
            for part, norm in zip(parts, norms):
                part.copy_(norm(part.contiguous()))
            return qkv_TX
        # A rank holds some of the heads, so that the sums of squares are summed over the ranks.
        sums_2T = self.tp.all_reduce(torch.stack([part.float().square().sum(-1) for part in parts]))
        for part, norm, sum_T in zip(parts, norms, sums_2T):
            mean_T1 = (sum_T / (norm.width * norm.replicas)).unsqueeze(1)
            normed = (part.float() * torch.rsqrt(mean_T1 + self.eps)).to(part.dtype)
            part.copy_(normed * norm.weight)
        return qkv_TX


class Olmo2Layer(nn.Module):
    """residual += norm(attention(residual)), then residual += norm(mlp(residual)). Both sums are whole on
    every rank, so nothing is left to the next layer."""

    attention_class: type[Attention] = Olmo2Attention

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        assert isinstance(kind.mixer, AttentionKind)
        self.self_attn = self.attention_class(config, kind.mixer, tp, ops, backends)
        self.mlp = MLP(config, tp, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Takes and returns what DecoderLayer.forward does."""
        attention = self.self_attn
        qkv = attention.qkv_proj(residual_TD)
        if isinstance(attention, Olmo2Attention):
            qkv = attention.normed(qkv)
        out, residual = attention.attend(qkv, residual_TD, step)
        if out is None:
            return None, residual
        residual.add_(self.post_attention_layernorm(attention.o_proj(out)))
        hidden = self.mlp.whole(residual)
        return None, residual.add_(self.post_feedforward_layernorm(hidden))


class HeadNormOlmo2Layer(Olmo2Layer):
    """An Olmo2Layer in which each head of q and k is normed by itself, in the fused pass (EXAONE 4)."""

    attention_class = Attention
