"""The choice of each token's experts in Triton, one launch for any Router.

E experts · K choices of a token · C groups of experts. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.moe.mixture import RouterTensors
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import next_power_of_2
from shoal.kinds.experts import Router

LOWEST = tl.constexpr(float("-inf"))
LOWEST_INT = tl.constexpr(-(1 << 31))


@triton.jit
def _in_best_groups(
    choice, expert, E: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr
):
    """The scores, and -inf for experts outside of the KEPT best of C groups."""
    SIZE: tl.constexpr = E // C
    BLOCK_C: tl.constexpr = triton.next_power_of_2(C)
    group = tl.arange(0, BLOCK_C)
    scores = tl.full((BLOCK_C,), LOWEST, tl.float32)
    for c in tl.static_range(C):
        own = tl.where(expert // SIZE == c, choice, LOWEST)
        score, best = tl.max(own, axis=0, return_indices=True)
        if TWO_BEST:
            score += tl.max(tl.where(expert == best, LOWEST, own), axis=0)
        scores = tl.where(group == c, score, scores)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        _, best = tl.max(scores, axis=0, return_indices=True)
        kept = kept | (expert // SIZE == best)
        scores = tl.where(group == best, LOWEST, scores)
    return tl.where(kept, choice, LOWEST)


@triton.jit
def _flipped(bits):
    """The bits of floats, as integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _route(
    router_logits_ptr,
    correction_ptr,
    expert_scale_ptr,
    weights_ptr,
    experts_ptr,
    ranks_ptr,
    counts_ptr,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    SCORES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    C: tl.constexpr,
    KEPT: tl.constexpr,
    TWO_BEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Chooses the experts of one token. A slot's rank is its number within its expert. Ranks may come in any
    order, because rows of a matmul do not depend on each other. SHARED: the slot after the K chosen ones is
    the shared expert's, E; each token has one, so its rank is the token's number."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    router_logits_ptr += token * (E + SHARED_GATE)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    exists = expert < E
    scores = tl.load(router_logits_ptr + expert, mask=exists, other=LOWEST).to(tl.float32)
    if SOFTCAP > 0:
        doubled = tl.exp(-2.0 * tl.abs(scores) / SOFTCAP)
        capped = SOFTCAP * (1.0 - doubled) / (1.0 + doubled)
        scores = tl.where(exists, tl.where(scores < 0, -capped, capped), LOWEST)
    if SCORES == "softmax":
        exps = tl.exp(scores - tl.max(scores, axis=0))
        scores = exps / tl.sum(exps, axis=0)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    left = scores
    if correction_ptr is not None:
        left += tl.load(correction_ptr + expert, mask=exists, other=0.0)
    left = tl.where(exists, left, LOWEST)
    if C > 1:
        left = _in_best_groups(left, expert, E, C, KEPT, TWO_BEST)
    weights = tl.full((BLOCK_K,), LOWEST if SCORES == "chosen" else 0.0, tl.float32)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    # A warp finds the maximum of integers in one instruction.
    ints = tl.where(exists, _flipped((left + 0.0).to(tl.int32, bitcast=True)), LOWEST_INT)
    for j in range(K):
        highest = tl.max(ints, axis=0)
        best = tl.min(tl.where(ints == highest, expert, E - 1), axis=0)
        weight = _flipped(highest).to(tl.float32, bitcast=True)
        if correction_ptr is not None:
            weight = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        weights = tl.where(slot == j, weight, weights)
        experts = tl.where(slot == j, best, experts)
        ints = tl.where(expert == best, LOWEST_INT, ints)
    mask = slot < K
    if SCORES == "chosen":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights /= tl.sum(weights, axis=0)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=0) + EPS
    if expert_scale_ptr is not None:
        weights *= tl.load(expert_scale_ptr + experts, mask=mask, other=0.0)
    weights *= SCALE
    ranks = tl.zeros((BLOCK_K,), tl.int32)
    if counts_ptr is not None:
        ranks = tl.atomic_add(counts_ptr + experts, 1, mask=mask, sem="relaxed")
    if SHARED:
        share = 1.0
        if SHARED_GATE:
            share = 1.0 / (1.0 + tl.exp(-tl.load(router_logits_ptr + E).to(tl.float32)))
        mask = slot <= K
        weights = tl.where(slot == K, share, weights)
        experts = tl.where(slot == K, E, experts)
        ranks = tl.where(slot == K, token.to(tl.int32), ranks)
        if counts_ptr is not None:
            tl.store(counts_ptr + E, tl.num_programs(0), mask=token == 0)
    slot += token * (K + SHARED)
    if counts_ptr is not None:
        tl.store(ranks_ptr + slot, ranks, mask=mask)
    tl.store(weights_ptr + slot, weights, mask=mask)
    tl.store(experts_ptr + slot, experts, mask=mask)


def route(
    router_logits_TE: torch.Tensor,
    router: Router,
    tensors: RouterTensors,
    weights: torch.Tensor,
    experts: torch.Tensor,
    ranks: torch.Tensor | None,
    counts_E: torch.Tensor | None,
) -> None:
    """Writes each slot's weight and expert, [T * slots of a token]. With counts, which are 0, writes ranks,
    and counts each expert's slots."""
    num_tokens, num_experts = len(router_logits_TE), router_logits_TE.shape[1] - router.joined_gate
    for tensor in tensors:
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
    assert router_logits_TE.is_contiguous() and num_experts % router.num_groups == 0
    _route[(num_tokens,)](
        router_logits_TE,
        tensors.correction_E,
        tensors.expert_scale_E,
        weights,
        experts,
        ranks,
        counts_E,
        E=num_experts,
        K=router.top_k,
        SHARED=router.joined,
        SHARED_GATE=router.joined_gate,
        SCORES=router.scores,
        RENORMALIZE=router.renormalize,
        EPS=router.eps,
        SCALE=router.scale,
        SOFTCAP=router.softcap or 0.0,
        C=router.num_groups,
        KEPT=router.top_k_groups,
        TWO_BEST=router.group_score == "two best",
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(router.num_slots),
        num_warps=1,
        **pdl_options(),
    )
