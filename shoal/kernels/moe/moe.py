"""Mixture of experts in Triton, for a captured graph: no count reaches the host, and grids are upper bounds.

A slot is one pair of a token and one of its k choices. There are five kernels:

1. route.py chooses each token's experts, and numbers the slots of each expert. 2. `_arrange` lists the slots
expert by expert, and cuts each expert's part of the list into tiles of BLOCK_M. 3. `_gate_up` is the first
matmul over those tiles. It gathers the rows of tokens. 4. `_down` is the second matmul. It scatters its
results to the slots. 5. `_combine` sums each token's slots by weight in float32. ADD: the sum, rounded, is
added to the output, which
   holds the residual.

Weights of fewer bits have matmuls of their own in place of 3 and 4 (packed_moe.py).

T tokens · E experts · k choices of a token · D hidden · F intermediate. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.activation import silu
from shoal.kernels.matmul.dispatch import Blocks, choose_blocks
from shoal.kernels.matmul.linear import fitting_stages
from shoal.kernels.moe.mixture import NO_TENSORS, ExpertWeights, RouterTensors
from shoal.kernels.moe.packed_moe import PackedExperts, packed_matmul, packed_shape
from shoal.kernels.moe.route import route
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.experts import Activation, Router

ARRANGED = tl.constexpr(128)  # slots, and tiles, of a program of `_arrange`


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _arrange(
    experts_ptr,
    ranks_ptr,
    counts_ptr,
    slots_ptr,
    tiles_ptr,
    num_slots,
    num_tiles,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Writes the list of all slots, expert by expert, and for each tile its expert (-1: the tile is not used)
    and where its slots start and end in that list."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    i = tl.program_id(0) * ARRANGED + tl.arange(0, ARRANGED)

    mask = i < num_slots
    slot_expert = tl.load(experts_ptr + i, mask=mask, other=0)
    start = tl.sum(tl.where(expert < slot_expert[:, None], counts, 0), axis=1)
    tl.store(slots_ptr + start + tl.load(ranks_ptr + i, mask=mask, other=0), i, mask=mask)

    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    last_tiles = tl.cumsum(tiles, axis=1)
    before = last_tiles <= i[:, None]  # experts whose tiles all come before tile i
    tile_expert = tl.sum(before.to(tl.int32), axis=1)
    used = tile_expert < E
    tile_in_expert = i - tl.sum(tl.where(before, tiles, 0), axis=1)
    first = tl.sum(tl.where(before, counts, 0), axis=1)
    count = tl.sum(tl.where(expert == tile_expert[:, None], counts, 0), axis=1)
    mask = i < num_tiles
    tl.store(tiles_ptr + i * 3, tl.where(used, tile_expert, -1), mask=mask)
    tl.store(tiles_ptr + i * 3 + 1, first + tile_in_expert * BLOCK_M, mask=mask)
    tl.store(tiles_ptr + i * 3 + 2, first + count, mask=mask)


@triton.jit
def _gate_up(
    x_ptr,
    w13_ptr,
    hidden_ptr,
    slots_ptr,
    tiles_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden[i] = silu(x @ gate) * (x @ up), where x is the token of the i-th slot in the list."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    in_tile = row < tl.load(tile_ptr + 2)
    token = (tl.load(slots_ptr + row, mask=in_tile, other=0) // K).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = column < F
    d = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token[:, None] * D + d[None, :]
    gate_ptrs = w13_ptr + expert * 2 * F * D + column[None, :].to(tl.int64) * D + d[:, None]
    up_ptrs = gate_ptrs + F * D
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        in_depth = start + d < D
        x = tl.load(x_ptrs, mask=in_tile[:, None] & in_depth[None, :], other=0.0)
        w_mask = in_depth[:, None] & in_columns[None, :]
        gate = tl.dot(x, tl.load(gate_ptrs, mask=w_mask, other=0.0), gate, input_precision=PRECISION)
        up = tl.dot(x, tl.load(up_ptrs, mask=w_mask, other=0.0), up, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    hidden_ptrs = hidden_ptr + row[:, None].to(tl.int64) * F + column[None, :]
    dtype = hidden_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)  # Separate matmuls round so.
    tl.store(hidden_ptrs, (silu(gate) * up).to(dtype), mask=in_tile[:, None] & in_columns[None, :])


@triton.jit
def _down(
    hidden_ptr,
    w2_ptr,
    out_ptr,
    slots_ptr,
    tiles_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[slot] = hidden[i] @ down, where slot is the i-th in the list."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    in_tile = row < tl.load(tile_ptr + 2)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = column < D
    f = tl.arange(0, BLOCK_K)
    hidden_ptrs = hidden_ptr + row[:, None].to(tl.int64) * F + f[None, :]
    w_ptrs = w2_ptr + expert * D * F + column[None, :].to(tl.int64) * F + f[:, None]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, F, BLOCK_K):
        in_depth = start + f < F
        hidden = tl.load(hidden_ptrs, mask=in_tile[:, None] & in_depth[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=in_depth[:, None] & in_columns[None, :], other=0.0)
        out = tl.dot(hidden, w, out, input_precision=PRECISION)
        hidden_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    slot = tl.load(slots_ptr + row, mask=in_tile, other=0).to(tl.int64)
    tl.store(
        out_ptr + slot[:, None] * D + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_tile[:, None] & in_columns[None, :],
    )


@triton.jit
def _combine(slots_out_ptr, weights_ptr, out_ptr, D, K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        total += tl.load(slots_out_ptr + slot * D + column, mask=mask, other=0.0).to(tl.float32) * tl.load(
            weights_ptr + slot
        )
    out = total.to(out_ptr.dtype.element_ty)
    if ADD:
        out = (
            tl.load(out_ptr + token * D + column, mask=mask, other=0.0).to(tl.float32) + out.to(tl.float32)
        ).to(out.dtype)
    tl.store(out_ptr + token * D + column, out, mask=mask)


def moe(
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    weights: ExpertWeights,
    activation: Activation,
    residual_TD: torch.Tensor | None = None,
    tensors: RouterTensors = NO_TENSORS,
) -> torch.Tensor:
    """Sums the results of each token's best experts, by router weight, [T, D]. With a residual, the sum is
    added to it in place, and it is returned."""
    packed = not (isinstance(weights.w13, torch.Tensor) and isinstance(weights.w2, torch.Tensor))
    blocks = choose_blocks(x_TD.shape[0] * router.top_k, router_logits_TE.shape[1], x_TD.dtype, packed)
    return moe_with(blocks, x_TD, router_logits_TE, router, weights, activation, residual_TD, tensors)


def moe_with(
    blocks: Blocks,
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    weights: ExpertWeights,
    activation: Activation,
    residual_TD: torch.Tensor | None = None,
    tensors: RouterTensors = NO_TENSORS,
) -> torch.Tensor:
    assert x_TD.is_contiguous() and router_logits_TE.is_contiguous()
    w13_E2FD, w2_EDF, b13, b2 = weights
    assert activation.kind == "silu" and b13 is None and b2 is None, "not yet"
    top_k = router.top_k
    (num_tokens, hidden), num_experts = x_TD.shape, router_logits_TE.shape[1]
    size = _shape(w2_EDF, num_experts)[2]
    assert _shape(w13_E2FD, num_experts) == (num_experts, 2 * size, hidden)
    assert _shape(w2_EDF, num_experts) == (num_experts, hidden, size)
    num_slots = num_tokens * top_k
    # An expert fills all its tiles but one.
    num_tiles = min(num_slots, cdiv(num_slots, blocks.m) + num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x_TD.device)
    # They are separate tensors so that each is aligned.
    experts, ranks, slots = (torch.empty(num_slots, dtype=torch.int32, device=x_TD.device) for _ in range(3))
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=x_TD.device)
    slot_weights = torch.empty(num_slots, dtype=torch.float32, device=x_TD.device)
    hidden_states, slots_out = x_TD.new_empty((num_slots, size)), x_TD.new_empty((num_slots, hidden))
    out_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
    assert out_TD.is_contiguous() and out_TD.shape == x_TD.shape and out_TD.dtype == x_TD.dtype
    num_programs = cdiv(max(num_slots, num_tiles), ARRANGED.value)
    products = dict(
        D=hidden,
        F=size,
        PRECISION="ieee" if x_TD.dtype == torch.float32 else "tf32",
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        num_warps=blocks.num_warps,
        num_stages=fitting_stages(
            blocks.num_stages, (blocks.m + 2 * blocks.n) * blocks.k * x_TD.itemsize, x_TD.device
        ),
    )
    route(router_logits_TE, router, tensors, slot_weights, experts, ranks, counts)
    _arrange[(num_programs,)](
        experts,
        ranks,
        counts,
        slots,
        tiles,
        num_slots,
        num_tiles,
        E=num_experts,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=blocks.m,
        num_warps=8,
    )
    listed = slots, tiles, num_experts, top_k, blocks.m
    if isinstance(w13_E2FD, torch.Tensor):
        _gate_up[(cdiv(size, blocks.n), num_tiles)](
            x_TD, w13_E2FD, hidden_states, slots, tiles, K=top_k, **products
        )
    else:
        packed_matmul(x_TD, w13_E2FD, hidden_states, *listed, gated=True)
    if isinstance(w2_EDF, torch.Tensor):
        _down[(cdiv(hidden, blocks.n), num_tiles)](hidden_states, w2_EDF, slots_out, slots, tiles, **products)
    else:
        packed_matmul(hidden_states, w2_EDF, slots_out, *listed, gated=False)
    block = min(1024, next_power_of_2(hidden))
    _combine[(num_tokens, cdiv(hidden, block))](
        slots_out, slot_weights, out_TD, hidden, K=top_k, ADD=residual_TD is not None, BLOCK=block
    )
    return out_TD


def _shape(weight: torch.Tensor | PackedExperts, num_experts: int) -> tuple[int, ...]:
    if not isinstance(weight, torch.Tensor):
        return packed_shape(weight, num_experts)
    assert weight.is_contiguous()
    return tuple(weight.shape)
