"""Recurrent layers between their two matmuls: a convolution, a rule that reads and writes the state, and a
gated norm, here as calls of these three ops. A kernel that fuses them must equal them.

T tokens · C channels of the convolution · W its width · K key heads · H heads · N numbers of a key · V of a
value · X of all heads · G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.recurrent.sequences import Sequences

# causal_conv, gated_delta or mamba2, and gated_norm: ops of kernels/ops.py.
Parts = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    conv_CW: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class MambaWeights:
    conv_CW: torch.Tensor
    conv_C: torch.Tensor | None
    a_log_H: torch.Tensor
    d_H: torch.Tensor
    dt_bias_H: torch.Tensor
    limits: tuple[float, float]  # the range of dt after its softplus
    norm_X: torch.Tensor
    eps: float


def delta_in_parts(
    parts: Parts,
    qkv_TC: torch.Tensor,
    z_TX: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: DeltaWeights,
    memory: LayerState,
    sequences: Sequences,
) -> torch.Tensor:
    """Returns a gated delta net's outputs, [T, X]. Each head has a norm, whose gate is z."""
    conv, rule, norm = parts
    size, columns, keys = delta_sizes(weights, memory)
    inputs_RCW, kept_RKC = memory.conv_RCW, memory.kept_conv_RKC
    mixed_TC = conv(qkv_TC, weights.conv_CW, None, True, inputs_RCW, sequences, kept_RKC)
    q, k, v = mixed_TC.split((keys * size, keys * size, z_TX.shape[1]), dim=1)
    out_THV = rule(
        q.unflatten(1, (-1, size)),
        k.unflatten(1, (-1, size)),
        v.unflatten(1, (-1, columns)),
        a_TH,
        b_TH,
        weights.a_log_H,
        weights.dt_bias_H,
        memory.state_R,
        sequences,
        memory.kept_state_RKX,
    )
    return norm(out_THV.flatten(1), z_TX, weights.norm_V, weights.eps, columns, gate_first=False)


def mamba_in_parts(
    parts: Parts,
    xbc_TC: torch.Tensor,
    z_TX: torch.Tensor,
    dt_TH: torch.Tensor,
    weights: MambaWeights,
    memory: LayerState,
    sequences: Sequences,
) -> torch.Tensor:
    """Returns a Mamba-2 layer's outputs, [T, X]. z is the gate of the norm, which is over a group's heads."""
    conv, rule, norm = parts
    columns, size, groups = mamba_sizes(weights, memory)
    inputs_RCW, kept_RKC = memory.conv_RCW, memory.kept_conv_RKC
    mixed_TC = conv(xbc_TC, weights.conv_CW, weights.conv_C, True, inputs_RCW, sequences, kept_RKC)
    x, b, c = mixed_TC.split((z_TX.shape[1], groups * size, groups * size), dim=1)
    out_THV = rule(
        x.unflatten(1, (-1, columns)),
        dt_TH,
        b.unflatten(1, (-1, size)),
        c.unflatten(1, (-1, size)),
        weights.a_log_H,
        weights.d_H,
        weights.dt_bias_H,
        weights.limits,
        memory.state_R,
        sequences,
        memory.kept_state_RKX,
    )
    part = z_TX.shape[1] // groups
    return norm(out_THV.flatten(1), z_TX, weights.norm_X, weights.eps, part, gate_first=True)


def delta_sizes(weights: DeltaWeights, memory: LayerState) -> tuple[int, int, int]:
    """Returns N, V and K."""
    assert memory.state_R is not None
    heads, size, columns = memory.state_R.shape[1:]
    return size, columns, (len(weights.conv_CW) - heads * columns) // (2 * size)


def mamba_sizes(weights: MambaWeights, memory: LayerState) -> tuple[int, int, int]:
    """Returns V, N and G."""
    assert memory.state_R is not None
    heads, columns, size = memory.state_R.shape[1:]
    return columns, size, (len(weights.conv_CW) - heads * columns) // (2 * size)
