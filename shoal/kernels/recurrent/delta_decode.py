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
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import sigmoid, softplus
from shoal.kernels.recurrent.conv import causal_conv
from shoal.kernels.recurrent.decode import (
    MAX_ARRIVALS,
    apart,
    arrives_last,
    checked_memory,
    convolve,
    earlier_inputs,
    is_plain_decode,
    keep_inputs,
)
from shoal.kernels.recurrent.delta import gated_delta, normed
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
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of one key head read the same inputs of the convolution; the last of them to arrive writes
    the next ones."""
    KEYS: tl.constexpr = H // SHARED
    head, seq = tl.program_id(0), tl.program_id(1)
    n, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    token, last = tl.load(starts_ptr + seq).to(tl.int64), tl.load(starts_ptr + seq + 1)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    has_row = (last > token) & (row >= 0)
    goes_on = tl.load(positions_ptr + token, mask=has_row, other=-1) > 0
    states_ptr += row * stride_row + head * N * V
    inputs_ptr += row * stride_inputs
    at, mask = n[:, None] * V + c[None, :], (n < N)[:, None] & (c < V)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(states_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    q_channels = head // SHARED * N + n
    k_channels, v_channels = KEYS * N + q_channels, 2 * KEYS * N + head * V + c
    q_before, q_weight = earlier_inputs(inputs_ptr, weight_ptr, q_channels, n < N, goes_on, W)
    k_before, k_weight = earlier_inputs(inputs_ptr, weight_ptr, k_channels, n < N, goes_on, W)
    v_before, v_weight = earlier_inputs(inputs_ptr, weight_ptr, v_channels, c < V, goes_on, W)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + c, mask=c < V, other=0.0)
    wait_for_inputs(PDL)
    if last > token:
        token_ptr = x_ptr + token * stride_x
        q, q_inputs = convolve(token_ptr, None, q_before, q_weight, q_channels, n < N, W)
        k, k_inputs = convolve(token_ptr, None, k_before, k_weight, k_channels, n < N, W)
        v, v_inputs = convolve(token_ptr, None, v_before, v_weight, v_channels, c < V, W)
        gate = tl.load(a_ptr + token * stride_a + head).to(tl.float32)
        beta = sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
        z = tl.load(z_ptr + token * stride_z + head * V + c, mask=c < V, other=0.0).to(tl.float32)
        q, k, v = apart(normed(q) * (N**-0.5), 0), apart(normed(k), 0), apart(v, 1)
        state *= tl.exp(rate * softplus(gate + dt_bias))
        change = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state += k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
        gated = norm_and_gate(out[None, :], z[None, :], norm[None, :], eps, V, False)
        out_at = (token * H + head) * V + c[None, :]
        tl.store(out_ptr + out_at, gated, mask=(c < V)[None, :])
        if row >= 0:
            tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
            is_last = arrives_last(arrived_ptr + seq * KEYS + head // SHARED, SHARED)
            keep_inputs(inputs_ptr, v_before, v_inputs, v_channels, c < V, W)
            if is_last:
                keep_inputs(inputs_ptr, q_before, q_inputs, q_channels, n < N, W)
                keep_inputs(inputs_ptr, k_before, k_inputs, k_channels, n < N, W)


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
    if not is_plain_decode(sequences, keys):
        parts = causal_conv, gated_delta, gated_norm
        return delta_in_parts(parts, qkv_TC, z_TX, a_TH, b_TH, weights, memory, sequences)
    inputs = qkv_TC, z_TX, a_TH, b_TH
    inputs_RCW, states_RHNV = checked_memory(memory, weights.conv_CW, weights.norm_V, *inputs)
    assert weights.norm_V.numel() == columns
    heads, out_TX = states_RHNV.shape[1], empty_matmul_input(z_TX, *z_TX.shape)
    if num_seqs:
        _delta_decode_kernel[(heads, num_seqs)](
            *inputs,
            *(weights.conv_CW, weights.a_log_H, weights.dt_bias_H, weights.norm_V, inputs_RCW, states_RHNV),
            *(sequences.rows_S, sequences.starts_S, sequences.positions_T),
            arrival_counters("recurrent_decode", MAX_ARRIVALS, qkv_TC.device),
            out_TX,
            weights.eps,
            *(x.stride(0) for x in (*inputs, inputs_RCW, states_RHNV)),
            H=heads,
            SHARED=heads // keys,
            N=size,
            V=columns,
            W=weights.conv_CW.shape[1],
            BLOCK_N=next_power_of_2(size),
            BLOCK_V=next_power_of_2(columns),
            num_warps=WARPS,
            maxnreg=REGISTERS if states_RHNV.itemsize == 2 and num_seqs >= MANY_SEQS else None,
            **pdl_options(),
        )
    return out_TX
