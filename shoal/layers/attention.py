"""Self-attention of one layer: the norm of the sum with the residual and one product for q, k and v; one
fused pass (q/k norm, rope, cache write); the backend; the output product."""

from __future__ import annotations

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kernels.step_input import AttentionBackend, StepInput
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class Attention(nn.Module):
    """T tokens, H query heads and G kv heads on this rank, N head size."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        ops: Ops,
        backend: AttentionBackend,
        keep_quantized: bool,
    ) -> None:
        super().__init__()
        self.ops, self.backend, self.eps = ops, backend, config.rms_norm_eps
        self.window = config.windows[layer]
        self.num_heads = config.num_heads // tp.size
        replicas = config.kv_head_replicas(tp.size)
        self.num_kv_heads = config.kv_heads_per_rank(tp.size)
        self.head_dim = n = config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            (config.num_heads * n, config.num_kv_heads * n, config.num_kv_heads * n),
            tp,
            ops,
            split="columns",
            bias=config.qkv_bias,
            replicas=(1, replicas, replicas),
            keep_quantized=keep_quantized,
        )
        self.o_proj = Linear(
            config.num_heads * n,
            (config.hidden_size,),
            tp,
            ops,
            split="rows",
            bias=config.o_bias,
            keep_quantized=keep_quantized,
        )
        self.q_norm = RMSNorm(n, config.rms_norm_eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(n, config.rms_norm_eps, ops) if config.qk_norm else None

    def forward(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        norm: RMSNorm,
        step: StepInput,
        kv_layer: torch.Tensor,
        cos_sin: torch.Tensor,
        select_S: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Of the norm of residual + x; returns what is left to add to the sum (None: nothing), and the sum;
        both [S, D] if `select_S` says which tokens are wanted."""
        h, g, n = self.num_heads, self.num_kv_heads, self.head_dim
        qkv, residual_TD = norm.add_linear(x_TD, residual_TD, self.qkv_proj)
        q_norm = self.q_norm.weight if self.q_norm is not None else None
        k_norm = self.k_norm.weight if self.k_norm is not None else None
        self.ops.qk_norm_rope_store(
            qkv,
            q_norm,
            k_norm,
            self.eps,
            cos_sin,
            step.positions_T,
            step.rows_T,
            step.block_tables_RM,
            kv_layer,
            h,
            g,
            self.backend.reads_k(self.window),
        )
        # of a chunk that ends no prompt the cache is all that anyone reads
        if select_S is not None and len(select_S) == 0:
            return None, residual_TD[:0]
        heads = qkv.view(-1, h + 2 * g, n)
        out_THN = self.backend.attend(
            heads[:, :h],
            heads[:, h : h + g],
            heads[:, h + g :],
            kv_layer,
            step,
            self.window,
            selected=select_S is not None,
        )
        out, residual = out_THN.view(-1, h * n), residual_TD
        if select_S is not None:
            out, residual = out[select_S], residual[select_S]
        return self.o_proj.add_to(out, residual), residual
