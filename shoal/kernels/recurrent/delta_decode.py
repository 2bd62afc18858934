"""A decode step of a gated delta net as one Triton kernel: convolution, gates, delta rule and gated norm. A
program has the state of one head, which it reads while the kernels before it still run.

S sequences · C channels · W width of the convolution · K key heads · H value heads · N numbers of a key · V
numbers of a value · R state rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.matmul.split_k import arrival_counters, arrives_last
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import sigmoid, softplus
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
from shoal.kernels.recurrent.delta import gated_delta, normed
from shoal.kernels.recurrent.drafts import draft_arguments, kept_slot, token_span
from shoal.kernels.recurrent.gated_norm import gated_norm, norm_and_gate
from shoal.kernels.recurrent.mixers import DeltaWeights, delta_in_parts, delta_sizes
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.rounding import next_power_of_2

WARPS = 4
# Registers of a thread if states have 16 bits: three programs share an SM then, as they are bound by latency.
# States in float32 are bound by memory, and spill. A few sequences do not fill the GPU.
REGISTERS = 168
MANY_SEQS = 16


@triton.jit
def _token(token_ptr, a, b, state, earlier, weights, channels, masks, rate, dt_bias, N, W: tl.constexpr):
    """Returns the state [N, V] after a token, its query, its key and value after the convolution, and the
    inputs that the next token takes."""
    q, q_inputs = convolve(token_ptr, None, earlier[0], weights[0], channels[0], masks[0], W)
    k, k_inputs = convolve(token_ptr, None, earlier[1], weights[1], channels[1], masks[1], W)
    v, v_inputs = convolve(token_ptr, None, earlier[2], weights[2], channels[2], masks[2], W)
    key, value = apart(normed(k), 0), apart(v, 1)
    state *= tl.exp(rate * softplus(a.to(tl.float32) + dt_bias))
    change = (value - tl.sum(state * key[:, None], axis=0)) * sigmoid(b.to(tl.float32))
    state += key[:, None] * change[None, :]
    return state, apart(normed(q) * (N**-0.5), 0), k, v, (q_inputs, k_inputs, v_inputs)


@triton.jit
def _output(state, q, z_ptr, norm, out_ptr, at, mask, eps, V: tl.constexpr):
    """Writes a token's output, normed and gated."""
    z = tl.load(z_ptr, mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
    gated = norm_and_gate(out[None, :], z[None, :], norm[None, :], eps, V, False)
    tl.store(out_ptr + at[None, :], gated, mask=mask[None, :])


@triton.jit(do_not_specialize=["num_drafting"])
def _delta_decode_kernel(
    x_ptr,
    z_ptr,
    a_ptr,
    b_ptr,
    weight_ptr,
    a_log_ptr,
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
    stride_x,
    stride_z,
    stride_a,
    stride_b,
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
    DRAFTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of one key head read the same inputs of the convolution, and the same kept ones. The last of
    these programs to arrive, when all have read them, writes the next ones."""
    KEYS: tl.constexpr = H // SHARED
    CHANNELS: tl.constexpr = 2 * KEYS * N + H * V
    KEPT: tl.constexpr = KEYS * N + H * V + 2 * H
    head, seq = tl.program_id(0), tl.program_id(1)
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    first, last, pending, position, _ = token_span(
        seq, starts_ptr, draft_starts_ptr, verified_ptr, pending_ptr, num_drafting, DRAFTS
    )
    row = tl.load(rows_ptr + seq).to(tl.int64)
    has_row = row >= 0
    starts_anew = tl.load(positions_ptr + first, mask=has_row & (last > first), other=-1) <= 0
    goes_on = has_row & ((pending > 0) | (starts_anew == 0))
    states_ptr += row * stride_row + head * N * V
    inputs_ptr += row * stride_inputs
    at, mask = n[:, None] * V + c[None, :], (n < N)[:, None] & (c < V)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(states_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    k_at, v_at = head // SHARED * N + n, head * V + c
    channels, masks = (k_at, KEYS * N + k_at, 2 * KEYS * N + v_at), (n < N, n < N, c < V)
    q_inputs, q_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[0], n < N, goes_on, W)
    k_inputs, k_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[1], n < N, goes_on, W)
    v_inputs, v_weight = earlier_inputs(inputs_ptr, weight_ptr, channels[2], c < V, goes_on, W)
    inputs, weights = (q_inputs, k_inputs, v_inputs), (q_weight, k_weight, v_weight)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + c, mask=c < V, other=0.0)
    wait_for_inputs(PDL)
    if DRAFTS:
        for i in range(pending):
            own = position - pending + i
            token_ptr = kept_slot(kept_inputs_ptr, row, stride_kept_inputs, own, SLOTS, CHANNELS)
            gates_ptr = kept_slot(kept_ptr, row, stride_kept, own, SLOTS, KEPT) + KEYS * N + H * V + head
            a, b = tl.load(gates_ptr), tl.load(gates_ptr + H)
            state, q, k, v, inputs = _token(
                token_ptr, a, b, state, inputs, weights, channels, masks, rate, dt_bias, N, W
            )
            state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
    if last > first:
        token = first.to(tl.int64)
        a, b = tl.load(a_ptr + token * stride_a + head), tl.load(b_ptr + token * stride_b + head)
        token_ptr = x_ptr + token * stride_x
        state, q, k, v, inputs = _token(
            token_ptr, a, b, state, inputs, weights, channels, masks, rate, dt_bias, N, W
        )
        out_at = token * (H * V) + v_at
        _output(state, q, z_ptr + token * stride_z + v_at, norm, out_ptr, out_at, c < V, eps, V)
    if has_row & (last - first + pending > 0):
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
        is_last = arrives_last(arrived_ptr + seq * KEYS + head // SHARED, SHARED)
        store_inputs(inputs_ptr, inputs[2], channels[2], c < V, W)
        if is_last:
            store_inputs(inputs_ptr, inputs[0], channels[0], n < N, W)
            store_inputs(inputs_ptr, inputs[1], channels[1], n < N, W)
        if DRAFTS:
            for i in range(1, last - first):
                # as if it was stored, so that drafts change nothing
                state = state.to(states_ptr.dtype.element_ty).to(tl.float32)
                token = first.to(tl.int64) + i
                a, b = tl.load(a_ptr + token * stride_a + head), tl.load(b_ptr + token * stride_b + head)
                token_ptr = x_ptr + token * stride_x
                state, q, k, v, inputs = _token(
                    token_ptr, a, b, state, inputs, weights, channels, masks, rate, dt_bias, N, W
                )
                out_at = token * (H * V) + v_at
                _output(state, q, z_ptr + token * stride_z + v_at, norm, out_ptr, out_at, c < V, eps, V)
                slot_ptr = kept_slot(kept_ptr, row, stride_kept, position + i, SLOTS, KEPT)
                to_ptr = kept_slot(kept_inputs_ptr, row, stride_kept_inputs, position + i, SLOTS, CHANNELS)
                tl.store(to_ptr + channels[2], inputs[2][W - 2], mask=c < V)
                tl.store(slot_ptr + KEYS * N + v_at, v.to(kept_ptr.dtype.element_ty), mask=c < V)
                tl.store(slot_ptr + KEYS * N + H * V + head, a.to(kept_ptr.dtype.element_ty))
                tl.store(slot_ptr + KEYS * N + H * V + H + head, b.to(kept_ptr.dtype.element_ty))
                if is_last:
                    tl.store(to_ptr + channels[0], inputs[0][W - 2], mask=n < N)
                    tl.store(to_ptr + channels[1], inputs[1][W - 2], mask=n < N)
                    tl.store(slot_ptr + k_at, k.to(kept_ptr.dtype.element_ty), mask=n < N)


def delta_mixer(
    qkv_TC: torch.Tensor,
    z_TX: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: DeltaWeights,
    memory: LayerState,
    sequences: Sequences,
) -> torch.Tensor:
    """As mixers.delta_in_parts."""
    size, columns, keys = delta_sizes(weights, memory)
    num_seqs = len(sequences.rows_S)
    if not decodes_alone(sequences, keys):
        parts = causal_conv, gated_delta, gated_norm
        return delta_in_parts(parts, qkv_TC, z_TX, a_TH, b_TH, weights, memory, sequences)
    inputs = qkv_TC, z_TX, a_TH, b_TH
    inputs_RCW, states_RHNV = checked_memory(memory, weights.conv_CW, weights.norm_V, *inputs)
    assert weights.norm_V.numel() == columns
    drafts, draft_sizes = draft_arguments(sequences, memory.kept_state_RKX)
    heads, out_TX = states_RHNV.shape[1], empty_matmul_input(z_TX, *z_TX.shape)
    if num_seqs:
        _delta_decode_kernel[(heads, num_seqs)](
            *inputs,
            *(weights.conv_CW, weights.a_log_H, weights.dt_bias_H, weights.norm_V, inputs_RCW, states_RHNV),
            *(sequences.rows_S, sequences.starts_S, sequences.positions_T),
            arrival_counters("delta_decode", MAX_ARRIVALS, qkv_TC.device),
            out_TX,
            weights.eps,
            *(x.stride(0) for x in (*inputs, inputs_RCW, states_RHNV)),
            *drafts,
            *kept_inputs(memory, sequences),
            H=heads,
            SHARED=heads // keys,
            N=size,
            V=columns,
            W=weights.conv_CW.shape[1],
            BLOCK_N=next_power_of_2(size),
            BLOCK_V=next_power_of_2(columns),
            **draft_sizes,
            num_warps=WARPS,
            maxnreg=REGISTERS if states_RHNV.itemsize == 2 and num_seqs >= MANY_SEQS else None,
            **pdl_options(),
        )
    return out_TX
