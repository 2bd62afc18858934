"""The choice of experts by each family's rule, in plain PyTorch and in Triton's interpreter. The oracle is
`transformers`: the router of the family, on random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import RouterTensors
from shoal.kernels.moe.route import route as triton_route
from shoal.kinds.experts import Router

HIDDEN = 16
GROUPED = dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
# name -> the oracle's class, fields of its config, experts, choices, and our rule
FAMILIES: dict[str, tuple[Callable[[Any], nn.Module], dict[str, Any], int, int, Router]] = {
    "qwen3-moe": (Qwen3MoeTopKRouter, dict(norm_topk_prob=True), 8, 3, Router(3, renormalize=True)),
    "qwen3-moe, as they are": (Qwen3MoeTopKRouter, dict(norm_topk_prob=False), 8, 3, Router(3)),
    "gpt-oss": (GptOssTopKRouter, {}, 8, 4, Router(4, scores="chosen", bias=True)),
    "glm4-moe": (
        Glm4MoeTopkRouter,
        dict(n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5),
        20,
        5,
        Router(5, True, "sigmoid", 1e-20, 1.5, correction=True),
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        GROUPED,
        24,
        5,
        Router(5, True, "sigmoid", 1e-20, 2.5, None, 4, 2, "two best", correction=True),
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        dict(GROUPED, topk_method="group_limited_greedy"),
        12,
        3,
        Router(3, scale=2.5, num_groups=4, top_k_groups=2),
    ),
    "laguna": (
        LagunaTopKRouter,
        dict(moe_router_logit_softcapping=0.7),
        33,
        8,
        Router(8, True, "sigmoid", softcap=0.7, correction=True),
    ),
    "ernie": (
        Ernie4_5_MoeTopKRouter,
        dict(moe_norm_min=1e-12),
        8,
        1,
        Router(1, True, eps=1e-12, correction=True),
    ),
    "gemma4": (
        Gemma4TextRouter,
        dict(rms_norm_eps=1e-6, top_k_experts=3),
        8,
        3,
        Router(3, True, expert_scale=True),
    ),
}


def drawn(name: str, tokens: int) -> tuple[torch.Tensor, RouterTensors, torch.Tensor]:
    """Router logits, the tensors of the rule, and the oracle's weight of each expert of each token, [T, E]."""
    print("seed", torch.manual_seed(8).initial_seed())
    build, fields, experts, top_k, _ = FAMILIES[name]
    counts = dict(num_experts=experts, num_local_experts=experts, num_experts_per_tok=top_k)
    oracle = build(SimpleNamespace(hidden_size=HIDDEN, **counts, **fields))
    for tensor in [*oracle.parameters(), *oracle.buffers()]:
        tensor.data.normal_(0, 0.4)
    inputs: list[torch.Tensor] = []
    if name == "gemma4":  # it returns probabilities in place of its logits
        oracle.proj.register_forward_hook(lambda module, args, out: inputs.append(out))
    with torch.no_grad():
        logits, weights, chosen = oracle(torch.randn(tokens, HIDDEN))
    logits = inputs[0] if inputs else logits
    named = dict([*oracle.named_parameters(), *oracle.named_buffers()])
    correction = next((t for n, t in named.items() if n.endswith("correction_bias")), None)
    scale = named.get("per_expert_scale")
    tensors = RouterTensors(
        None if correction is None else correction.detach().flatten(),
        None if scale is None else scale.detach(),
    )
    return logits, tensors, torch.zeros(tokens, experts).scatter_(1, chosen, weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_weights_equal_those_of_the_family(name: str) -> None:
    logits, tensors, want = drawn(name, 50)
    if name == "laguna":  # whose logits are capped before they are returned
        logits = 0.7 * torch.atanh((logits / 0.7).double())
    weights, experts = reference.route(logits, FAMILIES[name][-1], tensors)
    torch.testing.assert_close(torch.zeros_like(want).scatter_(1, experts, weights), want)


@pytest.mark.parametrize("shared", [{}, {"joined": True}, {"joined": True, "joined_gate": True}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernel_chooses_as_plain_pytorch_does(name: str, shared: dict[str, bool]) -> None:
    """With a shared expert among the others, too, which each token has."""
    router, tokens = replace(FAMILIES[name][-1], **shared), 9
    logits, tensors, _ = drawn(name, tokens)
    num_experts = logits.shape[1]
    if router.joined_gate:
        logits = torch.cat((logits, torch.randn(tokens, 1)), dim=1)
    want_weights, want_experts = reference.route(logits, router, tensors)
    if router.joined:
        assert want_experts[:, -1].tolist() == [num_experts] * tokens
        share = logits[:, -1].sigmoid() if router.joined_gate else torch.ones(tokens)
        torch.testing.assert_close(want_weights[:, -1], share)
    slots = tokens * router.num_slots
    weights, counts = torch.empty(slots), torch.zeros(num_experts + router.joined, dtype=torch.int32)
    experts, ranks = torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=torch.int32)
    triton_route(logits, router, tensors, weights, experts, ranks, counts)
    assert torch.equal(experts.view(tokens, -1), want_experts.int())
    torch.testing.assert_close(weights.view(tokens, -1), want_weights)
    assert torch.equal(counts, experts.bincount(minlength=len(counts)).int())
    for expert, count in enumerate(counts.tolist()):
        assert sorted(ranks[experts == expert].tolist()) == list(range(count))
