"""Mixture of experts in Triton, for a captured graph: no count reaches the host, and grids are upper bounds.

A slot is one pair of a token and one of its k choices. Experts are matmuls with a row map (tile_matmul.py; on
Hopper hopper_experts.py for many rows):

1. route.py chooses each token's experts, and numbers the slots of each expert.
2. `_arrange` lists the slots expert by expert, and cuts each expert's part of the list into tiles.
3. The first matmul gathers the rows of tokens. The second one scatters its results to the slots.
4. `_combine` sums each token's slots by weight in float32. ADD: the sum, rounded, is added to the output,
   which holds the residual.

Of few tokens only 1 and 3 are needed: each slot is a tile of its own, and the second matmul also sums.
In MXFP4 on Hopper, mxfp4_experts.py has 3 for few tokens, and 2 and 3 for more.

T tokens · E experts · k experts of a token · D hidden · F intermediate. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import HAS_GLUON
from shoal.kernels.matmul.dispatch import ExpertFormat, ExpertKernel, ExpertTiles, choose_expert_tiles, gpu_of
from shoal.kernels.matmul.loaders import Fp8Matrix, TiledWeight
from shoal.kernels.matmul.mxfp4_experts import (
    ExpertRuns,
    Slots,
    mix_few_slots,
    mix_slots,
    takes_few_slots,
    unpacked,
)
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.matmul.tile_matmul import LISTED, SLOTS, RowMap, Weight, tile_matmul, weight_shape
from shoal.kernels.moe.mixture import NO_TENSORS, ExpertWeights, RouterTensors
from shoal.kernels.moe.packed_experts import expert_matrix
from shoal.kernels.moe.route import route
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.experts import Activation, Router

if HAS_GLUON:
    from shoal.kernels.matmul.hopper_experts import hopper_experts_matmul

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
    PDL: tl.constexpr,
):
    """Writes the list of all slots, expert by expert, and for each tile its expert and where its slots start
    and end in that list (-1, 0 and 0: the tile is not used); and last, the number of used tiles. A program
    writes some slots, and of each expert every n-th tile, where n is the number of programs.

    The last expert's tiles come first. It may be the shared one: its tiles all read the same weights, mostly
    from the L2 cache, while tiles of other experts read from memory. At the list's end memory would idle."""
    wait_for_inputs(PDL)
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    ends = tl.cumsum(counts, axis=0)
    i = tl.program_id(0) * ARRANGED + tl.arange(0, ARRANGED)
    mask = i < num_slots
    slot_expert = tl.load(experts_ptr + i, mask=mask, other=0)
    start = tl.gather(ends - counts, slot_expert, axis=0)
    tl.store(slots_ptr + start + tl.load(ranks_ptr + i, mask=mask, other=0), i, mask=mask)

    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    last_tiles = tl.cumsum(tiles, axis=0)
    num_used = tl.sum(tiles, axis=0)
    tl.store(tiles_ptr + num_tiles * 3, num_used)
    unused = (i >= num_used) & (i < num_tiles)
    tl.store(tiles_ptr + i * 3, -1, mask=unused)
    tl.store(tiles_ptr + i * 3 + 1, 0, mask=unused)
    tl.store(tiles_ptr + i * 3 + 2, 0, mask=unused)
    for tile in range(tl.program_id(0), tl.max(tiles, axis=0), tl.num_programs(0)):
        ptrs = tiles_ptr + (num_used - last_tiles + tile) * 3
        exists = tile < tiles
        tl.store(ptrs, expert, mask=exists)
        tl.store(ptrs + 1, ends - counts + tile * BLOCK_M, mask=exists)
        tl.store(ptrs + 2, ends, mask=exists)


@triton.jit
def _combine(
    slots_out_ptr,
    weights_ptr,
    out_ptr,
    counts_ptr,
    D,
    E: tl.constexpr,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Also sets counts to 0 for the next launch of `_route`."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    if (token == 0) & (tl.program_id(1) == 0):
        expert = tl.arange(0, BLOCK_E)
        tl.store(counts_ptr + expert, tl.zeros((BLOCK_E,), tl.int32), mask=expert < E)
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
    first, second = expert_matrix(weights.w13), expert_matrix(weights.w2)
    num_experts = _shape(second)[0] // x_TD.shape[1]
    sizes = _shape(first)[1], _shape(second)[1]
    tiles = choose_expert_tiles(
        x_TD.shape[0] * router.num_slots,
        num_experts,
        sizes,
        (_format(first), _format(second)),
        x_TD.dtype,
        gpu_of(x_TD.device),
    )
    return moe_with(tiles, x_TD, router_logits_TE, router, weights, activation, residual_TD, tensors)


def moe_with(
    tiles: ExpertTiles,
    x_TD: torch.Tensor,
    router_logits_TE: torch.Tensor,
    router: Router,
    weights: ExpertWeights,
    activation: Activation,
    residual_TD: torch.Tensor | None = None,
    tensors: RouterTensors = NO_TENSORS,
) -> torch.Tensor:
    assert x_TD.is_contiguous() and router_logits_TE.is_contiguous()
    (num_tokens, hidden), top_k = x_TD.shape, router.num_slots
    w13, w2 = expert_matrix(weights.w13), expert_matrix(weights.w2)
    rows, size = _shape(w2)
    num_experts = rows // hidden
    out_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
    assert out_TD.is_contiguous() and out_TD.shape == x_TD.shape and out_TD.dtype == x_TD.dtype
    if num_tokens == 0:
        return out_TD
    num_slots, add = num_tokens * top_k, residual_TD is not None
    few_slots = tiles.slots
    if isinstance(w13, ExpertRuns) and isinstance(w2, ExpertRuns):
        few_slots = few_slots and takes_few_slots(w13, w2, top_k)
    counts = None
    if not few_slots:
        # `route` counts from 0 and `_combine` leaves zeros, so two layers' launches must not interleave.
        counts = arrival_counters("moe", num_experts, x_TD.device)
    # They are separate tensors so that each is aligned.
    experts = torch.empty(num_slots, dtype=torch.int32, device=x_TD.device)
    shares = torch.empty(num_slots, dtype=torch.float32, device=x_TD.device)
    ranks = None if counts is None else torch.empty_like(experts)
    route(router_logits_TE, router, tensors, shares, experts, ranks, counts)
    if isinstance(w13, ExpertRuns) and not tiles.widened:
        assert isinstance(w2, ExpertRuns)
        biases = weights.b13, weights.b2
        if ranks is None or counts is None:
            mix_few_slots(x_TD, w13, w2, biases, (experts, shares), activation, out_TD, add)
        else:
            slots = Slots(experts, ranks, counts, top_k)
            slots_out = mix_slots(x_TD, w13, w2, biases, slots, activation)
            _sum_slots(slots_out, shares, counts, out_TD, top_k, add)
        return out_TD
    hidden_states = x_TD.new_empty((num_slots, size))
    if counts is None:
        by_slot = RowMap(SLOTS, experts, num_slots, top_k, num_experts)
        by_token = RowMap(SLOTS, experts, num_tokens, top_k, num_experts, shares=shares)
        assert not isinstance(w13, ExpertRuns) and not isinstance(w2, ExpertRuns)
        tile_matmul(tiles.gate_up, x_TD, w13, weights.b13, hidden_states, activation, rows=by_slot)
        tile_matmul(tiles.down, hidden_states, w2, weights.b2, out_TD, add=add, rows=by_token)
        return out_TD
    listed = _arranged(experts, ranks, counts, tiles.gate_up.rows, top_k)
    assert tiles.gate_up.rows == tiles.down.rows
    slots_out = x_TD.new_empty((num_slots, hidden))
    both = (
        (tiles.gate_up, x_TD, w13, weights.b13, hidden_states, activation),
        (tiles.down, hidden_states, w2, weights.b2, slots_out, None),
    )
    for which, (own, rows_in, weight, bias_EO, rows_out, kind) in enumerate(both):
        if isinstance(weight, ExpertRuns):  # into memory that the next matmul, and the next layer, use again
            assert isinstance(w13, ExpertRuns) and isinstance(w2, ExpertRuns)
            weight = unpacked(w13, w2, activation, which)
        if tiles.kernel is ExpertKernel.HOPPER:
            hopper_experts_matmul(rows_in, weight, bias_EO, rows_out, listed, kind)
        else:
            tile_matmul(own, rows_in, weight, bias_EO, rows_out, kind, rows=listed)
        del weight
    _sum_slots(slots_out, shares, counts, out_TD, top_k, add)
    return out_TD


def _shape(weight: Weight | ExpertRuns) -> tuple[int, int]:
    return weight.shape if isinstance(weight, ExpertRuns) else weight_shape(weight)


def _sum_slots(
    slots_out: torch.Tensor,
    shares: torch.Tensor,
    counts: torch.Tensor,
    out_TD: torch.Tensor,
    top_k: int,
    add: bool,
) -> None:
    (num_tokens, hidden), num_experts = out_TD.shape, len(counts)
    block = min(1024, next_power_of_2(hidden))
    _combine[(num_tokens, cdiv(hidden, block))](
        slots_out,
        shares,
        out_TD,
        counts,
        hidden,
        E=num_experts,
        K=top_k,
        ADD=add,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK=block,
        **pdl_options(),
    )


def _arranged(
    experts: torch.Tensor, ranks: torch.Tensor | None, counts_E: torch.Tensor, block_rows: int, top_k: int
) -> RowMap:
    """Returns the list of slots, cut into tiles."""
    num_slots, num_experts = len(experts), len(counts_E)
    # An expert fills all its tiles but one.
    num_tiles = min(num_slots, cdiv(num_slots, block_rows) + num_experts)
    slots = torch.empty_like(experts)
    tiles = torch.empty(num_tiles * 3 + 1, dtype=torch.int32, device=experts.device)
    _arrange[(cdiv(max(num_slots, num_tiles), ARRANGED.value),)](
        experts,
        ranks,
        counts_E,
        slots,
        tiles,
        num_slots,
        num_tiles,
        E=num_experts,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_M=block_rows,
        num_warps=4,
        **pdl_options(),
    )
    return RowMap(LISTED, tiles, num_tiles, top_k, num_experts, slots)


def _format(weight: Weight | ExpertRuns) -> ExpertFormat:
    if isinstance(weight, ExpertRuns):
        return ExpertFormat(4, 32, is_e2m1=True, in_runs=True)
    if isinstance(weight, TiledWeight):
        return ExpertFormat(weight.bits, weight.group, is_e2m1=weight.e2m1)
    return ExpertFormat(8, weight.group, True) if isinstance(weight, Fp8Matrix) else ExpertFormat()
