"""The choice of experts on a GPU, by the rules of published sizes. The oracle is plain PyTorch (reference.py), which
tests/cpu/kernels/test_expert_choice.py compares with each family's router in transformers."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import RouterTensors
from shoal.kinds.experts import Router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RULES = {
    "gpt-oss-20b": (32, Router(4, scores="chosen", bias=True)),
    "qwen3-30b-a3b": (128, Router(8, renormalize=True)),
    "glm-4.5-air": (128, Router(8, True, "sigmoid", 1e-20, 1.0, correction=True)),
    "deepseek-v3": (256, Router(8, True, "sigmoid", 1e-20, 2.5, None, 8, 4, "two best", correction=True)),
    "deepseek-v2": (160, Router(6, scale=16.0, num_groups=8, top_k_groups=3)),
    "laguna-xs": (256, Router(8, True, "sigmoid", scale=2.5, softcap=30.0, correction=True)),
    "gemma-4-26b-a4b": (128, Router(8, True, expert_scale=True)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_the_kernel_chooses_as_plain_pytorch_does(name: str, tokens: int) -> None:
    from shoal.kernels.moe.route import route

    print("seed", torch.manual_seed(3).initial_seed())
    num_experts, router = RULES[name]
    # evenly spaced logits in a random order: no two experts tie
    order = torch.stack([torch.randperm(num_experts) for _ in range(tokens)])
    logits = (order.float() / num_experts * 4 - 2).cuda()
    tensors = RouterTensors(
        torch.rand(num_experts, device="cuda") * 0.1 if router.correction else None,
        torch.rand(num_experts, device="cuda") + 0.5 if router.expert_scale else None,
    )
    want_weights, want_experts = reference.route(logits, router, tensors)
    slots = tokens * router.top_k
    weights, counts = (
        torch.empty(slots, device="cuda"),
        torch.zeros(num_experts, dtype=torch.int32, device="cuda"),
    )
    experts, ranks = (torch.empty(slots, dtype=torch.int32, device="cuda") for _ in range(2))
    route(logits, router, tensors, weights, experts, ranks, counts)
    torch.testing.assert_close(
        torch.zeros_like(logits).scatter_(1, experts.view(tokens, -1).long(), weights.view(tokens, -1)),
        torch.zeros_like(logits).scatter_(1, want_experts, want_weights),
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(counts, experts.bincount(minlength=num_experts).int())
