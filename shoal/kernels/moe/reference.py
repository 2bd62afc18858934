"""Routing and experts in plain PyTorch: the oracle of this room's kernels, and the CPU's experts.

T tokens · E experts · k choices of a token · D hidden · F intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shoal.kernels.reference import silu_mul


def route(
    router_logits_TE: torch.Tensor, top_k: int, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights (float32) and ids of each token's best experts, [T, top_k]."""
    weights_Tk, experts_Tk = router_logits_TE.float().softmax(dim=-1).topk(top_k, dim=-1)
    if norm_topk_prob:
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
    return weights_Tk, experts_Tk


def moe(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    w13_E2FD: torch.Tensor,
    w2_EDF: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the results of the `top_k` best SwiGLU experts of each token, by router weight, in float32: [T,
    D]. w13 is gate over up. With a residual, the sum is added to it in place, and it is returned."""

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(silu_mul(F.linear(x, w13_E2FD[expert])), w2_EDF[expert])

    return mix_experts(x_TD, router_logits_TE, run_expert, top_k, norm_topk_prob, residual_TD)


def mix_experts(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    top_k: int,
    norm_topk_prob: bool,
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Computes what `moe` does, with experts of any kind: `run_expert(e, x)` is expert e's result for the
    tokens x."""
    weights_Tk, experts_Tk = route(router_logits_TE, top_k, norm_topk_prob)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in experts_Tk.unique().tolist():
        tokens, choice = (experts_Tk == expert).nonzero(as_tuple=True)
        result = run_expert(expert, x_TD[tokens])
        out_TD.index_add_(0, tokens, result.float() * weights_Tk[tokens, choice].unsqueeze(1))
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if residual_TD is None else residual_TD.add_(out_TD)
