"""Self-attention of one layer. It is four calls: one matmul for q, k and v of the norm of the residual; one
fused pass that norms q and k, rotates them and writes k and v to the cache; the backend; and the output
matmul."""

from __future__ import annotations

import torch
from torch import nn

from shoal.attention.step_input import AttentionBackend, StepInput
from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class Attention(nn.Module):
    """Shapes: T tokens, S selected tokens, H query heads and G kv heads on this rank, N head size, D
    hidden."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, ops: Ops, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.ops, self.backend, self.eps = ops, backend, config.rms_norm_eps
        self.window = config.windows[layer]
        # The scales of keys and of values in an fp8 cache, float32 [2, G]. None: the cache has plain numbers.
        self.scales_2G: torch.Tensor | None = None
        self.num_heads = config.num_heads // tp.size
        replicas = config.kv_head_replicas(tp.size)
        self.num_kv_heads = config.kv_heads_per_rank(tp.size)
        self.head_dim = n = config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {
                "q_proj": config.num_heads * n,
                "k_proj": config.num_kv_heads * n,
                "v_proj": config.num_kv_heads * n,
            },
            tp,
            ops,
            split="columns",
            bias=config.qkv_bias,
            replicas=(1, replicas, replicas),
        )
        self.o_proj = Linear(
            config.num_heads * n,
            {"o_proj": config.hidden_size},
            tp,
            ops,
            split="rows",
            bias=config.o_bias,
            multiplier=config.residual_multiplier,
        )
        self.q_norm = RMSNorm(n, config.rms_norm_eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(n, config.rms_norm_eps, ops) if config.qk_norm else None

    def head_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """The norms of each head of q and of k, which are part of the fused pass."""
        return self.q_norm, self.k_norm

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
        """Returns what is left to add to the new residual (None: nothing; on several ranks this rank's part),
        and the new residual, which is residual + x. Both are [S, D] if `select_S` says which tokens are
        wanted. `norm` is taken of the new residual before the matmul."""
        qkv, residual_TD = norm.add_linear(x_TD, residual_TD, self.qkv_proj)
        out, residual = self.attend(qkv, residual_TD, step, kv_layer, cos_sin, select_S)
        return (None if out is None else self.o_proj.add_to(out, residual)), residual

    def attend(
        self,
        qkv: torch.Tensor,
        residual_TD: torch.Tensor,
        step: StepInput,
        kv_layer: torch.Tensor,
        cos_sin: torch.Tensor,
        select_S: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Turns the output of the q, k, v matmul, [T, (H + 2G) * N], into the input of the output matmul,
        [T, H * N], and returns it with the residual. `select_S` restricts both to the selected tokens. If it
        selects nothing, the first result is None."""
        h, g, n = self.num_heads, self.num_kv_heads, self.head_dim
        q_norm, k_norm = self.head_norms()
        self.ops.qk_norm_rope_store(
            qkv,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self.eps,
            cos_sin,
            step.positions_T,
            step.rows_T,
            step.block_tables_RM,
            kv_layer,
            h,
            g,
            self.backend.reads_k(self.window),
            self.scales_2G,
        )
        # No token is selected of a chunk that ends no prompt: such a chunk runs for what it writes to the
        # cache.
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
            scales_2G=self.scales_2G,
        )
        out, residual = out_THN.view(-1, h * n), residual_TD
        if select_S is not None:
            out, residual = out[select_S], residual[select_S]
        return out, residual
