"""Routing and experts in plain PyTorch: the oracle of this room's kernels, and the CPU's experts.

T tokens · E experts · k choices of a token · D hidden · F intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shoal.kernels.moe.mixture import Activation, ExpertWeights, Router


def route(router_logits_TE: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights (float32) and ids of each token's best experts, [T, top_k]."""
    weights_Tk, experts_Tk = router_logits_TE.float().softmax(dim=-1).topk(router.top_k, dim=-1)
    if router.renormalize:
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
    return weights_Tk, experts_Tk


def activate(gate_up_T2F: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns what an expert makes of gate and up, [T, F]. The first half of the columns is gate."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    if activation.kind == "silu":
        out_TF = F.silu(gate_TF) * up_TF
    elif activation.kind == "gelu_tanh":
        out_TF = F.gelu(gate_TF, approximate="tanh") * up_TF
    else:
        assert activation.kind == "clamped_swiglu"
        gate_TF = gate_TF.clamp(max=activation.limit)
        up_TF = up_TF.clamp(-activation.limit, activation.limit)
        out_TF = (up_TF + 1) * gate_TF * torch.sigmoid(activation.alpha * gate_TF)
    return out_TF.to(gate_up_T2F.dtype)


def moe(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    weights: ExpertWeights,
    activation: Activation,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the results of each token's best experts, by router weight, in float32: [T, D]. With a residual,
    the sum is added to it in place, and it is returned."""
    w13, w2, b13, b2 = weights
    assert isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor)

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(x, w13[expert], None if b13 is None else b13[expert])
        return F.linear(activate(gate_up, activation), w2[expert], None if b2 is None else b2[expert])

    return mix_experts(x_TD, router_logits_TE, router, run_expert, residual_TD)


def mix_experts(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Computes what `moe` does, with experts of any kind: `run_expert(e, x)` is expert e's result for the
    tokens x."""
    weights_Tk, experts_Tk = route(router_logits_TE, router)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in experts_Tk.unique().tolist():
        tokens, choice = (experts_Tk == expert).nonzero(as_tuple=True)
        result = run_expert(expert, x_TD[tokens])
        out_TD.index_add_(0, tokens, result.float() * weights_Tk[tokens, choice].unsqueeze(1))
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if residual_TD is None else residual_TD.add_(out_TD)
