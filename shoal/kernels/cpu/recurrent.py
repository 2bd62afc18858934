"""Recurrent layers on the CPU: calls of recurrent.c for float32 activations, the reference for others."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.recurrent import reference
from shoal.kernels.recurrent.mixers import delta_in_parts, mamba_in_parts
from shoal.kernels.recurrent.sequences import Sequences

LIBRARY = cpu_build.load()
# As in recurrent.c: the widest convolution, and the longest part of a state that fits on a stack.
MAX_WIDTH, MAX_STATE = 16, 1024


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    silu: bool,
    inputs_RCW: torch.Tensor,
    sequences: Sequences,
    kept_RKC: torch.Tensor | None = None,
) -> torch.Tensor:
    channels, width = weight_CW.shape
    if LIBRARY is None or inputs_RCW.dtype != torch.float32 or not _floats(x_TC) or width > MAX_WIDTH:
        return reference.causal_conv(x_TC, weight_CW, bias_C, silu, inputs_RCW, sequences, kept_RKC)
    weight_CW, bias = weight_CW.float().contiguous(), None if bias_C is None else bias_C.float()
    out_TC = torch.empty((len(x_TC), channels), dtype=torch.float32)
    states = _describe(inputs_RCW, sequences, kept_RKC)
    LIBRARY.shoal_causal_conv(
        ctypes.addressof(states),
        x_TC.data_ptr(),
        x_TC.stride(0),
        weight_CW.data_ptr(),
        None if bias is None else bias.data_ptr(),
        channels,
        width,
        silu,
        out_TC.data_ptr(),
    )
    return out_TC


def gated_delta(
    q_TKN: torch.Tensor,
    k_TKN: torch.Tensor,
    v_THV: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    states_RHNV: torch.Tensor,
    sequences: Sequences,
    kept_RKX: torch.Tensor | None = None,
) -> torch.Tensor:
    if LIBRARY is None or not _floats(q_TKN, k_TKN, v_THV, a_TH, b_TH) or q_TKN.shape[2] > MAX_STATE:
        return reference.gated_delta(
            q_TKN, k_TKN, v_THV, a_TH, b_TH, a_log_H, dt_bias_H, states_RHNV, sequences, kept_RKX
        )
    out_THV = torch.empty(v_THV.shape, dtype=torch.float32)
    constants = (a_log_H.float(), dt_bias_H.float())
    heads = cpu_build.Heads(
        *(x.data_ptr() for x in (q_TKN, k_TKN, v_THV, a_TH, b_TH, *constants)),
        None,
        out_THV.data_ptr(),
        *(x.stride(0) for x in (q_TKN, k_TKN, v_THV, a_TH, b_TH)),
        q_TKN.shape[1],
        v_THV.shape[1],
        *states_RHNV.shape[2:],
        dt_bias_H.numel() // v_THV.shape[1],
    )
    states = _describe(states_RHNV, sequences, kept_RKX)
    LIBRARY.shoal_gated_delta(ctypes.addressof(heads), ctypes.addressof(states))
    return out_THV


def mamba2(
    x_THV: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    a_log_H: torch.Tensor,
    d_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    limits: tuple[float, float],
    states_RHVN: torch.Tensor,
    sequences: Sequences,
    kept_RKX: torch.Tensor | None = None,
) -> torch.Tensor:
    if LIBRARY is None or not _floats(x_THV, dt_TH, b_TGN, c_TGN) or b_TGN.shape[2] > MAX_STATE:
        return reference.mamba2(
            x_THV, dt_TH, b_TGN, c_TGN, a_log_H, d_H, dt_bias_H, limits, states_RHVN, sequences, kept_RKX
        )
    out_THV = torch.empty(x_THV.shape, dtype=torch.float32)
    constants = (a_log_H.float(), dt_bias_H.float(), d_H.float())
    heads = cpu_build.Heads(
        *(x.data_ptr() for x in (c_TGN, b_TGN, x_THV, dt_TH)),
        None,
        *(x.data_ptr() for x in constants),
        out_THV.data_ptr(),
        *(x.stride(0) for x in (c_TGN, b_TGN, x_THV, dt_TH)),
        0,
        b_TGN.shape[1],
        x_THV.shape[1],
        b_TGN.shape[2],
        x_THV.shape[2],
        1,
        *limits,
    )
    states = _describe(states_RHVN, sequences, kept_RKX)
    LIBRARY.shoal_mamba2(ctypes.addressof(heads), ctypes.addressof(states))
    return out_THV


def gated_norm(
    x_TX: torch.Tensor,
    gate_TX: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    size: int,
    gate_first: bool,
    activation: str = "silu",
) -> torch.Tensor:
    if LIBRARY is None or not _floats(x_TX, gate_TX):
        return reference.gated_norm(x_TX, gate_TX, weight, eps, size, gate_first, activation)
    (tokens, width), weights = x_TX.shape, weight.float().contiguous()
    assert gate_TX.shape == x_TX.shape and width % size == 0 and width % weights.numel() == 0
    out_TX = torch.empty((tokens, width), dtype=torch.float32)
    LIBRARY.shoal_gated_norm(
        x_TX.data_ptr(),
        x_TX.stride(0),
        gate_TX.data_ptr(),
        gate_TX.stride(0),
        weights.data_ptr(),
        weights.numel(),
        eps,
        tokens,
        width // size,
        size,
        gate_first,
        activation == "sigmoid",
        out_TX.data_ptr(),
    )
    return out_TX


delta_mixer = partial(delta_in_parts, (causal_conv, gated_delta, gated_norm))
mamba_mixer = partial(mamba_in_parts, (causal_conv, mamba2, gated_norm))


def _floats(*tensors: torch.Tensor) -> bool:
    """float32 numbers, with no gaps but between tokens."""
    for x in tensors:
        if x.dtype != torch.float32:
            return False
        assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return True


def _describe(states: torch.Tensor, sequences: Sequences, kept_RKX: torch.Tensor | None) -> cpu_build.States:
    """The struct holds addresses only, so the tensors must outlive it."""
    assert states[0].is_contiguous() and states.dtype in (torch.float32, torch.bfloat16)
    drafts = sequences.drafts
    of_drafts = () if drafts is None else (drafts.starts_B, drafts.verified_B, drafts.pending_B)
    for tensor in (sequences.rows_S, sequences.starts_S, sequences.positions_T, *of_drafts):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    kept, stride, drafting = None, 0, (0, 0, 0)
    if drafts is not None:
        assert kept_RKX is not None and kept_RKX.dtype == torch.float32 and kept_RKX[0].is_contiguous()
        kept, stride = kept_RKX.data_ptr(), kept_RKX.stride(0)
        drafting = len(drafts.verified_B), *kept_RKX.shape[1:]
    return cpu_build.States(
        sequences.rows_S.data_ptr(),
        sequences.starts_S.data_ptr(),
        sequences.positions_T.data_ptr(),
        *(tensor.data_ptr() for tensor in of_drafts),
        *([None] * (3 - len(of_drafts))),
        states.data_ptr(),
        kept,
        states.stride(0),
        stride,
        len(sequences.rows_S),
        len(states) - 1,
        states.dtype == torch.bfloat16,
        *drafting,
    )
