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
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.recurrent.chunks import softplus
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
    H: tl.constexpr,
    SHARED: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of a group read the same inputs of the convolution."""
    GROUPS: tl.constexpr = H // SHARED
    PART: tl.constexpr = SHARED * V
    head, seq = tl.program_id(0), tl.program_id(1)
    n, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V)
    group = head // SHARED
    token, last = tl.load(starts_ptr + seq).to(tl.int64), tl.load(starts_ptr + seq + 1)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    has_row = (last > token) & (row >= 0)
    goes_on = tl.load(positions_ptr + token, mask=has_row, other=-1) > 0
    states_ptr += row * stride_row + head * V * N
    inputs_ptr += row * stride_inputs
    at, mask = r[:, None] * N + n[None, :], (r < V)[:, None] & (n < N)[None, :]
    # Earlier kernels of this step write other layers' states, so this one may be read before they are done.
    state = tl.load(states_ptr + at, mask=mask & goes_on, other=0.0, cache_modifier=".cg").to(tl.float32)
    x_channels, b_channels = head * V + r, H * V + group * N + n
    c_channels = GROUPS * N + b_channels
    x_before, x_weight = earlier_inputs(inputs_ptr, weight_ptr, x_channels, r < V, goes_on, W)
    b_before, b_weight = earlier_inputs(inputs_ptr, weight_ptr, b_channels, n < N, goes_on, W)
    c_before, c_weight = earlier_inputs(inputs_ptr, weight_ptr, c_channels, n < N, goes_on, W)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias, d = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    if last > token:
        token_ptr = x_ptr + token * stride_x
        x, x_inputs = convolve(token_ptr, bias_ptr, x_before, x_weight, x_channels, r < V, W)
        b, b_inputs = convolve(token_ptr, bias_ptr, b_before, b_weight, b_channels, n < N, W)
        c, c_inputs = convolve(token_ptr, bias_ptr, c_before, c_weight, c_channels, n < N, W)
        x, b, c = apart(x, 0), apart(b, 1), apart(c, 1)
        dt = softplus(tl.load(dt_ptr + token * stride_dt + head).to(tl.float32) + dt_bias)
        dt = tl.minimum(tl.maximum(dt, least_dt), most_dt)
        state = state * tl.exp(rate * dt) + (x * dt)[:, None] * b[None, :]
        out = (tl.sum(state * c[None, :], axis=1) + d * x).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (H * V) + head * V + r, out, mask=r < V)
        is_last = arrives_last(arrived_ptr + seq * GROUPS + group, SHARED)
        if is_last:
            # Other programs wrote these, so they are read past this processor's L1 cache (.cg).
            column = tl.arange(0, BLOCK_P)
            of_part, column = (column < PART)[None, :], group * PART + column[None, :]
            part = tl.load(out_ptr + token * (H * V) + column, mask=of_part, other=0.0, cache_modifier=".cg")
            z = tl.load(z_ptr + token * stride_z + column, mask=of_part, other=0.0).to(tl.float32)
            norm = tl.load(norm_ptr + column, mask=of_part, other=0.0)
            gated = norm_and_gate(part, z, norm, eps, PART, True)
            tl.store(out_ptr + token * (H * V) + column, gated, mask=of_part)
        if row >= 0:
            tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=mask)
            keep_inputs(inputs_ptr, x_before, x_inputs, x_channels, r < V, W)
            if is_last:
                keep_inputs(inputs_ptr, b_before, b_inputs, b_channels, n < N, W)
                keep_inputs(inputs_ptr, c_before, c_inputs, c_channels, n < N, W)


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
    if not is_plain_decode(sequences, groups) or (shared > MOST_SHARED and num_seqs > FEW_SEQS):
        parts = causal_conv, mamba2, gated_norm
        return mamba_in_parts(parts, xbc_TC, z_TX, dt_TH, weights, memory, sequences)
    inputs = xbc_TC, z_TX, dt_TH
    inputs_RCW, states_RHVN = checked_memory(memory, weights.conv_CW, weights.norm_X, *inputs)
    assert weights.norm_X.shape == z_TX.shape[1:]
    heads, out_TX = states_RHVN.shape[1], empty_matmul_input(z_TX, *z_TX.shape)
    if num_seqs:
        _mamba_decode_kernel[(heads, num_seqs)](
            *inputs,
            *(weights.conv_CW, weights.conv_C, weights.a_log_H),
            *(weights.d_H, weights.dt_bias_H, weights.norm_X, inputs_RCW, states_RHVN),
            *(sequences.rows_S, sequences.starts_S, sequences.positions_T),
            arrival_counters("recurrent_decode", MAX_ARRIVALS, xbc_TC.device),
            out_TX,
            weights.eps,
            *map(float, weights.limits),
            *(x.stride(0) for x in (*inputs, inputs_RCW, states_RHVN)),
            H=heads,
            SHARED=heads // groups,
            N=size,
            V=columns,
            W=weights.conv_CW.shape[1],
            BLOCK_N=next_power_of_2(size),
            BLOCK_V=next_power_of_2(columns),
            BLOCK_P=next_power_of_2(heads // groups * columns),
            num_warps=WARPS,
            **pdl_options(),
        )
    return out_TX
