"""Self-attention of one layer. It is four calls: one matmul for q, k and v of the norm of the residual; one
fused pass that norms q and k, rotates them and writes k and v to the cache; the backend; and the output
matmul."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.backend import AttentionShape, Backends
from shoal.kernels.ops import Ops
from shoal.layers.head_numbers import HeadNumbers
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.linear import Linear, output_linear
from shoal.layers.norm import RMSNorm
from shoal.layers.norm_kinds import build_head_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import AttentionKind, ModelConfig


def attention_shape(kind: AttentionKind, tp_size: int) -> AttentionShape:
    """The heads of a layer on each rank."""
    kv_heads = kind.kv_heads_per_rank(tp_size)
    return AttentionShape(kind.num_heads // tp_size, kv_heads, kind.head_dim, kind.scale, kind.softcap)


class Attention(nn.Module):
    """Shapes: T tokens, S selected tokens, H query heads and G kv heads on this rank, N head size, D
    hidden."""

    def __init__(
        self,
        config: ModelConfig,
        kind: AttentionKind,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        in_features: int | None = None,
    ) -> None:
        """`in_features`: what q, k and v are made of; None: a hidden state."""
        super().__init__()
        self.ops, self.eps, self.shape = ops, config.rms_norm_eps, attention_shape(kind, tp.size)
        self.kind, self.backend, n = kind, backends[self.shape], kind.head_dim
        replicas, kv = kind.kv_head_replicas(tp.size), kind.num_kv_heads * n
        self.qkv_proj = Linear(
            in_features or config.hidden_size,
            {"q_proj": kind.num_heads * n} | ({"k_proj": kv, "v_proj": kv} if kind.kv_layer is None else {}),
            tp,
            ops,
            split="columns",
            bias=config.qkv_bias,
            replicas=(1, replicas, replicas) if kind.kv_layer is None else (1,),
        )
        self.o_proj = output_linear(config, "o_proj", kind.num_heads * n, tp, ops, config.o_bias)
        self.q_norm = build_head_norm(config, kind, ops)
        self.k_norm = build_head_norm(config, kind, ops) if kind.kv_layer is None else None
        self.sinks = HeadNumbers(kind.num_heads, tp) if kind.sinks else None
        # attend_new_tokens takes norms of q and k, a rotation, a window and sinks, and nothing else
        additions = kind.softcap, kind.qk_rms, kind.v_norm, kind.query_scaling, kind.in_chunks
        self.is_plain = not any(additions) and kind.kv_layer is None and not kind.v_is_k

    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norms of each head of q and of k, which are part of the fused pass."""
        return self.q_norm, self.k_norm

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm, step: CacheStep
    ) -> Stream:
        """Returns what is left to add to the new residual (None: nothing; on several ranks this rank's part),
        and the new residual, which is residual + x. Both are [S, D] if `step.select_S` says which tokens
        are wanted. `norm` is taken of the new residual before the matmul."""
        qkv, residual_TD = norm.add_linear(x_TD, residual_TD, self.qkv_proj)
        out, residual = self.attend(qkv, residual_TD, step)
        return (None if out is None else self.o_proj.add_to(out, residual)), residual

    def attend(self, qkv: torch.Tensor, residual_TD: torch.Tensor, step: CacheStep) -> Stream:
        """Turns the output of the q, k, v matmul, [T, (H + 2G) * N], into the input of the output matmul,
        [T, H * N], and returns it with the residual. There is q alone if another layer stores k and v.
        `step.select_S` restricts both to the selected tokens. If it selects nothing, the first result is
        None."""
        h, g, n = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        q_norm, k_norm = (None if norm is None else norm.weight for norm in self.head_norms())
        given, cache, cos_sin, select_S = step
        tokens = given.positions_T, given.rows_T, given.block_tables[cache.table]
        inputs = qkv, q_norm, k_norm, self.eps, cos_sin, *tokens, cache
        sinks_H = None if self.sinks is None else self.sinks.values_H
        if self.is_plain and select_S is None and given.num_decodes == len(qkv):  # a token of each sequence
            out = self.ops.attend_new_tokens(*inputs, given.kv_lens_S, self.shape.scale, sinks_H)
            if out is not None:
                return out, residual_TD
        self.ops.qk_norm_rope_store(
            *inputs,
            self.backend.reads_k(cache),
            stores=self.kind.kv_layer is None,
            v_norm=self.kind.v_norm,
            query_scaling=self.kind.query_scaling,
        )
        # No token is selected of a chunk that ends no prompt: such a chunk runs for what it writes to the
        # cache.
        if select_S is not None and len(select_S) == 0:
            return None, residual_TD[:0]
        if self.kind.kv_layer is None:
            q_THN, k_TGN, v_TGN = qkv.view(-1, h + 2 * g, n).split((h, g, g), dim=1)
        else:
            q_THN, k_TGN, v_TGN = qkv.view(-1, h, n), None, None
        out_THN = self.backend.attend(q_THN, k_TGN, v_TGN, cache, given, select_S is not None, sinks_H)
        out = out_THN.view(-1, h * n)
        return (out, residual_TD) if select_S is None else (out[select_S], residual_TD[select_S])
