"""A decode step of a Mamba-2 layer as one Triton kernel: convolution, state space and gated norm. A program
has the state of one head, which it reads while the kernels before it still run. The last program of a group
of heads to arrive norms the group.

T tokens · C channels · W width of the convolution · H heads · V numbers of a head · X of all heads · G groups
N numbers of a state · R state rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.matmul.split_k import arrival_counters, arrives_last
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import softplus
from shoal.kernels.recurrent.conv import causal_conv
from shoal.kernels.recurrent.decode import (
    MAX_ARRIVALS,
    apart,
    checked_memory,
    convolve,
    decodes_alone,
    earlier_inputs,
    kept_inputs,
    store_inputs,
)
from shoal.kernels.recurrent.drafts import draft_arguments, kept_slot, token_span
from shoal.kernels.recurrent.gated_norm import gated_norm, norm_and_gate
from shoal.kernels.recurrent.mamba import mamba2
from shoal.kernels.recurrent.mixers import MambaWeights, mamba_in_parts, mamba_sizes
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import next_power_of_2

WARPS = 4
# Every program makes the convolution of its group's B and C, so the parts are quicker for more sequences if a
# group has more heads.
MOST_SHARED = 16
FEW_SEQS = 4


@triton.jit
def _token(
    token_ptr,
    bias_ptr,
    dt,
    state,
    earlier,
    weights,
    channels,
    masks,
    rate,
    dt_bias,
    d,
    least_dt,
    most_dt,
    W: tl.constexpr,
):
    """Returns the state [V, N] after a token, its output, its x and B after the convolution, and the inputs
    that the next token takes."""
    x, x_inputs = convolve(token_ptr, bias_ptr, earlier[0], weights[0], channels[0], masks[0], W)
    b, b_inputs = convolve(token_ptr, bias_ptr, earlier[1], weights[1], channels[1], masks[1], W)
    c, c_inputs = convolve(token_ptr, bias_ptr, earlier[2], weights[2], channels[2], masks[2], W)
    value, key, query = apart(x, 0), apart(b, 1), apart(c, 1)
    dt = softplus(dt.to(tl.float32) + dt_bias)
    dt = tl.minimum(tl.maximum(dt, least_dt), most_dt)
    state = state * tl.exp(rate * dt) + (value * dt)[:, None] * key[None, :]
    out = tl.sum(state * query[None, :], axis=1) + d * value
    return state, out, x, b, (x_inputs, b_inputs, c_inputs)


@triton.jit
def _norm_group(z_ptr, norm_ptr, out_ptr, first, eps, PART: tl.constexpr, BLOCK_P: tl.constexpr):
    """Norms and gates the outputs of a group's heads of one token. Column `first` is the group's first one.
    Other programs wrote them, so they are read past this processor's L1 cache (.cg)."""
    i = tl.arange(0, BLOCK_P)[None, :]
    column, mask = first + i, i < PART
    part = tl.load(out_ptr + column, mask=mask, other=0.0, cache_modifier=".cg")
    z = tl.load(z_ptr + column, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + column, mask=mask, other=0.0)
    tl.store(out_ptr + column, norm_and_gate(part, z, norm, eps, PART, True), mask=mask)


@triton.jit(do_not_specialize=["num_drafting"])
def _mamba_decode_kernel(
    x_ptr,
    z_ptr,
    dt_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    norm_ptr,
    inputs_ptr,
    states_ptr,
    rows_ptr,
    starts_ptr,
    positions_ptr,
    arrived_ptr,
    out_ptr,
    eps,
    least_dt,
    most_dt,
    stride_x,
    stride_z,
    stride_dt,
    stride_inputs,
    stride_row,
    draft_starts_ptr,
    verified_ptr,
    pending_ptr,
    num_drafting,
    kept_ptr,
    stride_kept,
    kept_inputs_ptr,
    stride_kept_inputs,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ARRIVALS: tl.constexpr,
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of a group read the same inputs of the convolution, and the same kept ones. The last of these
    programs to arrive, when all have read them, writes the next ones. With drafts they arrive once more, to
    norm the outputs of the drafts."""
    GROUPS: tl.constexpr = H // SHARED
    PART: tl.constexpr = SHARED * V
    CHANNELS: tl.constexpr = H * V + 2 * GROUPS * N
    KEPT: tl.constexpr = H * V + GROUPS * N + H
    head, seq = tl.program_id(0), tl.program_id(1)
    n, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    group = head // SHARED
    first, last, pending, position, _ = token_span(
        seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS
    )
    row = tl.load(rows_ptr + seq).to(tl.int64)
    has_row = row >= 0
    starts_anew = tl.load(positions_ptr + first, mask=has_row & (last > first), other=-1) <= 0
    goes_on = has_row & ((pending > 0) | (starts_anew == 0))
    states_ptr += row * stride_row + head * V * N
    inputs_ptr += row * stride_inputs
    arrived_ptr += seq * GROUPS + group
    at, mask = r[:, None] * N + n[None, :], (r < V)[:, None] & (n < N)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(states_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    x_at, b_at = head * V + r, H * V + group * N + n
    channels, masks = (x_at, b_at, GROUPS * N + b_at), (r < V, n < N, n < N)
    x_inputs, x_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[0], r < V, goes_on, W)
    b_inputs, b_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[1], n < N, goes_on, W)
    c_inputs, c_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[2], n < N, goes_on, W)
    inputs, weights = (x_inputs, b_inputs, c_inputs), (x_weight, b_weight, c_weight)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias, d = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    if DRAFTS:
        for i in range(pending):
            own = position - pending + i
            token_ptr = kept_slot(kept_inputs_ptr, row, stride_kept_inputs, own, SLOTS, CHANNELS)
            slot_ptr = kept_slot(kept_ptr, row, stride_kept, own, SLOTS, KEPT)
            dt = tl.load(slot_ptr + H * V + GROUPS * N + head)
            state, out, x, b, inputs = _token(
                *(token_ptr, bias_ptr, dt, state, inputs, weights, channels, masks),
                *(rate, dt_bias, d, least_dt, most_dt, W),
            )
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
    if last > first:
        token = first.to(tl.int64)
        token_ptr, dt = x_ptr + token * stride_x, tl.load(dt_ptr + token * stride_dt + head)
        state, out, x, b, inputs = _token(
            *(token_ptr, bias_ptr, dt, state, inputs, weights, channels, masks),
            *(rate, dt_bias, d, least_dt, most_dt, W),
        )
        tl.store(out_ptr + token * (H * V) + x_at, out.to(out_ptr.dtype.element_ty), mask=r < V)
    if has_row & (last - first + pending > 0):
        is_last = arrives_last(arrived_ptr, SHARED)
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
        store_inputs(inputs_ptr, inputs[0], channels[0], r < V, W)
        if is_last:
            store_inputs(inputs_ptr, inputs[1], channels[1], n < N, W)
            store_inputs(inputs_ptr, inputs[2], channels[2], n < N, W)
            if last > first:
                token = first.to(tl.int64)
                token_z_ptr, token_out_ptr = z_ptr + token * stride_z, out_ptr + token * (H * V)
                _norm_group(token_z_ptr, norm_ptr, token_out_ptr, group * PART, eps, PART, BLOCK_P)
        if DRAFTS:
            for i in range(1, last - first):
                # as if it was stored, so that drafts change nothing
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                token = first.to(tl.int64) + i
                token_ptr, dt = x_ptr + token * stride_x, tl.load(dt_ptr + token * stride_dt + head)
                state, out, x, b, inputs = _token(
                    *(token_ptr, bias_ptr, dt, state, inputs, weights, channels, masks),
                    *(rate, dt_bias, d, least_dt, most_dt, W),
                )
                tl.store(out_ptr + token * (H * V) + x_at, out.to(out_ptr.dtype.element_ty), mask=r < V)
                slot_ptr = kept_slot(kept_ptr, row, stride_kept, position + i, SLOTS, KEPT)
                to_ptr = kept_slot(kept_inputs_ptr, row, stride_kept_inputs, position + i, SLOTS, CHANNELS)
                tl.store(to_ptr + channels[0], inputs[0][W - 2], mask=r < V)
                tl.store(slot_ptr + x_at, x.to(kept_ptr.dtype.element_ty), mask=r < V)
                tl.store(slot_ptr + H * V + GROUPS * N + head, dt.to(kept_ptr.dtype.element_ty))
                if is_last:
                    tl.store(to_ptr + channels[1], inputs[1][W - 2], mask=n < N)
                    tl.store(to_ptr + channels[2], inputs[2][W - 2], mask=n < N)
                    tl.store(slot_ptr + b_at, b.to(kept_ptr.dtype.element_ty), mask=n < N)
            if last - first > 1:
                are_done = arrives_last(arrived_ptr + ARRIVALS, SHARED)
                if are_done:
                    for i in range(1, last - first):
                        token = first.to(tl.int64) + i
                        token_z_ptr, token_out_ptr = z_ptr + token * stride_z, out_ptr + token * (H * V)
                        _norm_group(token_z_ptr, norm_ptr, token_out_ptr, group * PART, eps, PART, BLOCK_P)


def mamba_mixer(
    xbc_TC: torch.Tensor,
    z_TX: torch.Tensor,
    dt_TH: torch.Tensor,
    weights: MambaWeights,
    memory: LayerState,
    sequences: Sequences,
) -> torch.Tensor:
    """As mixers.mamba_in_parts."""
    columns, size, groups = mamba_sizes(weights, memory)
    num_seqs = len(sequences.rows_S)
    shared = len(weights.a_log_H) // groups
    if not decodes_alone(sequences, groups) or (shared > MOST_SHARED and num_seqs > FEW_SEQS):
        parts = causal_conv, mamba2, gated_norm
        return mamba_in_parts(parts, xbc_TC, z_TX, dt_TH, weights, memory, sequences)
    inputs = xbc_TC, z_TX, dt_TH
    inputs_RCW, states_RHVN = checked_memory(memory, weights.conv_CW, weights.norm_X, *inputs)
    assert weights.norm_X.shape == z_TX.shape[1:]
    drafts, draft_sizes = draft_arguments(sequences, memory.kept_state_RKX)
    heads, out_TX = states_RHVN.shape[1], empty_matmul_input(z_TX, *z_TX.shape)
    if num_seqs:
        _mamba_decode_kernel[(heads, num_seqs)](
            *inputs,
            *(weights.conv_CW, weights.conv_C, weights.a_log_H),
            *(weights.d_H, weights.dt_bias_H, weights.norm_X, inputs_RCW, states_RHVN),
            *(sequences.rows_S, sequences.starts_S, sequences.positions_T),
            arrival_counters("mamba_decode", 2 * MAX_ARRIVALS, xbc_TC.device),
            out_TX,
            weights.eps,
            *map(float, weights.limits),
            *(x.stride(0) for x in (*inputs, inputs_RCW, states_RHVN)),
            *drafts,
            *kept_inputs(memory, sequences),
            H=heads,
            SHARED=heads // groups,
            N=size,
            V=columns,
            W=weights.conv_CW.shape[1],
            BLOCK_N=next_power_of_2(size),
            BLOCK_V=next_power_of_2(columns),
            BLOCK_P=next_power_of_2(heads // groups * columns),
            ARRIVALS=MAX_ARRIVALS,
            **draft_sizes,
            num_warps=WARPS,
            **pdl_options(),
        )
    return out_TX
