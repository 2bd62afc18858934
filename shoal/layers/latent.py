"""Multi-head latent attention of one layer (DeepSeek V2). Queries and the cache's latents come from one
matmul of the norm of the residual; one fused pass norms and rotates the latents and writes them to the cache;
the backend makes of queries and latents each head's sum of values.

Heads are divided over the ranks. Latents are all heads', so each rank computes and caches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.attention.latent import LatentBackend
from shoal.kernels.ops import Ops
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.kinds.latent import LatentKind
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.linear import Linear, output_linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig

# The norms of latents have the default of DeepSeek's class for norms, whatever rms_norm_eps a config says.
LATENT_EPS = 1e-6


def latent_shape(kind: LatentKind, tp_size: int) -> LatentKind:
    """The kind of a layer with one rank's heads. Layers of the same one share a backend."""
    return replace(kind, num_heads=kind.num_heads // tp_size)


class LatentAttention(nn.Module):
    """T tokens · S selected tokens · D hidden. kernels/latent/reference.py says what the others mean."""

    def __init__(
        self, config: ModelConfig, kind: LatentKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__()
        self.ops, self.kind = ops, latent_shape(kind, tp.size)
        self.backend: LatentBackend = backends[self.kind]
        queries, rank = kind.num_heads * kind.query_dim, kind.q_lora_rank
        self.a_proj = Linear(
            config.hidden_size,
            {"q_proj" if rank is None else "q_a_proj": rank or queries, "kv_a_proj_with_mqa": kind.head_dim},
            tp,
            ops,
            split="columns",
            bias=kind.bias,
            replicas=(1 if rank is None else tp.size, tp.size),
        )
        self.q_a_layernorm = None if rank is None else RMSNorm(rank, LATENT_EPS, ops)
        self.q_b_proj = (
            None if rank is None else Linear(rank, {"q_b_proj": queries}, tp, ops, split="columns")
        )
        self.kv_a_layernorm = RMSNorm(kind.kv_lora_rank, LATENT_EPS, ops)
        self.kv_b_proj = HeadMatrices(kind, tp)
        self.o_proj = output_linear(config, "o_proj", kind.num_heads * kind.v_head_dim, tp, ops, kind.bias)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: CacheStep
    ) -> Stream:
        """As Attention.forward."""
        kind, (given, cache, cos_sin, select_S) = self.kind, step
        assert cos_sin is not None
        a_TY, residual_TD = norm.add_linear(x_TD, residual_TD, self.a_proj)
        q_a, latent_TN = self.ops.latent_norm_rope_store(
            a_TY,
            None if self.q_a_layernorm is None else self.q_a_layernorm.weight,
            self.kv_a_layernorm.weight,
            LATENT_EPS,
            cos_sin,
            given.positions_T,
            given.rows_T,
            given.block_tables[cache.table],
            cache,
            kind.interleaved,
        )
        if select_S is not None and len(select_S) == 0:
            return None, residual_TD[:0]
        if self.q_b_proj is None:
            q_TX = a_TY[:, : kind.num_heads * kind.query_dim]
        else:
            assert q_a is not None
            q_TX = self.q_b_proj(q_a)
        q_THX = q_TX.unflatten(1, (kind.num_heads, kind.query_dim))
        out_THV = self.backend.attend(q_THX, latent_TN, self.kv_b_proj.weight, cos_sin, cache, given)
        return self.o_proj.add_selected(out_THV.flatten(1), residual_TD, select_S)


class HeadMatrices(LoadingLayer):
    """The matrices that make a head's key and value from a latent, [H, P + V, C] on this rank. They are
    multiplied by queries and by sums, head by head, and stay in plain numbers."""

    def __init__(self, kind: LatentKind, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.num_heads = tp, kind.num_heads
        heads, width = kind.num_heads // tp.size, kind.qk_nope_head_dim + kind.v_head_dim
        self.weight = nn.Parameter(torch.empty(heads, width, kind.kv_lora_rank), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", self._whole_shape(), self._load)

    def _whole_shape(self) -> tuple[int, int]:
        return self.num_heads * self.weight.shape[1], self.weight.shape[2]

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), self._whole_shape())
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.dequantize(self.weight.dtype)
        whole_HWC = tensor.unflatten(0, (self.num_heads, -1))
        copy_into(self.weight, whole_HWC.chunk(self.tp.size)[self.tp.rank], name)
