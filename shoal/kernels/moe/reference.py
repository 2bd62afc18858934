"""Routing and experts in plain PyTorch: the oracle of this room's kernels, and the CPU's experts.

T tokens · E experts · k experts of a token · C groups of experts · D hidden · F intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shoal.kernels.moe.mixture import NO_TENSORS, ExpertWeights, RouterTensors
from shoal.kinds.experts import Activation, Router


def route(
    router_logits_TE: torch.Tensor, router: Router, tensors: RouterTensors = NO_TENSORS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights (float32) and ids of each token's best experts, and of the shared one, [T, k]."""
    logits_TE = router_logits_TE.float()
    shared_T1 = logits_TE.new_ones(len(logits_TE), int(router.joined))
    if router.joined_gate:
        logits_TE, shared_T1 = logits_TE[:, :-1], logits_TE[:, -1:].sigmoid()
    if router.softcap is not None:
        logits_TE = router.softcap * torch.tanh(logits_TE / router.softcap)
    if router.scores == "softmax":
        scores_TE = logits_TE.softmax(dim=-1)
    else:
        scores_TE = logits_TE.sigmoid() if router.scores == "sigmoid" else logits_TE
    choice_TE = scores_TE if tensors.correction_E is None else scores_TE + tensors.correction_E
    if router.num_groups > 1:
        choice_TE = _in_best_groups(choice_TE, router)
    experts_Tk = choice_TE.topk(router.top_k, dim=-1).indices
    weights_Tk = scores_TE.gather(1, experts_Tk)
    if router.scores == "chosen":
        weights_Tk = weights_Tk.softmax(dim=-1)
    if router.renormalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + router.eps)
    if tensors.expert_scale_E is not None:
        weights_Tk = weights_Tk * tensors.expert_scale_E[experts_Tk]
    shared_experts = torch.full_like(shared_T1, logits_TE.shape[1], dtype=experts_Tk.dtype)
    weights_Tk = torch.cat((weights_Tk * router.scale, shared_T1), dim=1)
    return weights_Tk, torch.cat((experts_Tk, shared_experts), dim=1)


def _in_best_groups(choice_TE: torch.Tensor, router: Router) -> torch.Tensor:
    """The scores, and -inf for experts outside of the best groups."""
    groups_TCE = choice_TE.unflatten(1, (router.num_groups, -1))
    summed = 1 if router.group_score == "maximum" else 2
    groups_TC = groups_TCE.topk(summed, dim=-1).values.sum(dim=-1)
    left_out_TC = torch.ones_like(groups_TC, dtype=torch.bool)
    left_out_TC.scatter_(1, groups_TC.topk(router.top_k_groups, dim=-1).indices, False)
    return groups_TCE.masked_fill(left_out_TC.unsqueeze(2), float("-inf")).flatten(1)


def activate(gate_up_T2F: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns what an expert makes of gate and up, [T, F]. The first half of the columns is gate, if it has
    one."""
    if activation.kind == "relu2":
        return gate_up_T2F.relu().square()
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
    tensors: RouterTensors = NO_TENSORS,
) -> torch.Tensor:
    """Sums the results of each token's best experts, by router weight, in float32: [T, D]. With a residual,
    the sum is added to it in place, and it is returned."""
    w13, w2, b13, b2 = weights
    assert isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor)

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(x, w13[expert], None if b13 is None else b13[expert])
        return F.linear(activate(gate_up, activation), w2[expert], None if b2 is None else b2[expert])

    return mix_experts(x_TD, router_logits_TE, router, tensors, run_expert, residual_TD)


def mix_experts(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    tensors: RouterTensors,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Computes what `moe` does, with experts of any kind: `run_expert(e, x)` is expert e's result for the
    tokens x."""
    weights_Tk, experts_Tk = route(router_logits_TE, router, tensors)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    if len(x_TD) == 1:  # rows are neither gathered nor scattered, which takes as long as a small expert
        for expert, weight in sorted(zip(experts_Tk[0].tolist(), weights_Tk[0].tolist())):
            out_TD.add_(run_expert(expert, x_TD), alpha=weight)
    else:
        order = experts_Tk.flatten().argsort(stable=True)
        tokens, weights = order // router.num_slots, weights_Tk.flatten()[order].unsqueeze(1)
        start = 0
        for expert, count in enumerate(experts_Tk.flatten().bincount().tolist()):
            if count:
                own = slice(start, start + count)
                result = run_expert(expert, x_TD[tokens[own]]).float()
                out_TD.index_add_(0, tokens[own], result * weights[own])
                start += count
    out_TD = out_TD.to(x_TD.dtype)
    return out_TD if residual_TD is None else residual_TD.add_(out_TD)
