"""Recurrent layers in plain PyTorch: the oracle of the kernels beside this file, and the CPU's ops where it
has nothing faster. Sums and states are computed in float32; states are stored in the dtype of their rows.

T tokens · S sequences · C channels of a convolution · W its width · K key heads · H (value) heads · N numbers
of a key · V numbers of a value · G groups of heads · R state rows, with the spare one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from shoal.kernels.recurrent.sequences import Sequences


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    silu: bool,
    inputs_RCW: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Returns the depthwise convolution of each sequence, [T, C], through silu if asked. The last tap
    belongs to the token itself. `inputs_RCW` holds the W - 1 inputs before the step's, the oldest first; the
    step's last inputs take their place."""
    rows_S, lengths_S, starts_S = _spans(sequences)
    width, out_TC = weight_CW.shape[1], torch.zeros_like(x_TC)
    before_SWC = _begin(inputs_RCW, rows_S, starts_S, sequences).transpose(1, 2)
    sequence_T = torch.repeat_interleave(torch.arange(len(rows_S), device=x_TC.device), lengths_S)
    token_T = torch.arange(len(sequence_T), device=x_TC.device)
    # Each sequence has W - 1 inputs from before the step; the step's own inputs follow.
    inputs = torch.cat((before_SWC.flatten(0, 1).to(x_TC.dtype), x_TC[: len(token_T)]))

    def input_at(sequence: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """The inputs of sequences at offsets from their first tokens, which are -(W - 1) at least."""
        old = sequence * (width - 1) + width - 1 + offset
        return inputs[torch.where(offset < 0, old, len(rows_S) * (width - 1) + starts_S[sequence] + offset)]

    offset_T = token_T - starts_S[sequence_T]
    sums_TC = torch.zeros(len(token_T), x_TC.shape[1], device=x_TC.device)
    for tap in range(width):
        taken = input_at(sequence_T, offset_T - (width - 1) + tap)
        sums_TC += weight_CW[:, tap].float() * taken.float()
    if bias_C is not None:
        sums_TC += bias_C.float()
    out_TC[: len(token_T)] = F.silu(sums_TC) if silu else sums_TC
    each_S = torch.arange(len(rows_S), device=x_TC.device)
    last_SWC = torch.stack([input_at(each_S, lengths_S + i - (width - 1)) for i in range(width - 1)], dim=1)
    inputs_RCW[rows_S] = last_SWC.transpose(1, 2).to(inputs_RCW.dtype)
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
) -> torch.Tensor:
    """Returns the gated delta rule's outputs, [T, H, V] (Yang 2024). q and k are divided by their norms, and
    q by the root of N. Consecutive value heads share a key head."""
    rows_S, lengths_S, starts_S = _spans(sequences)
    shared = v_THV.shape[1] // q_TKN.shape[1]
    q_THN, k_THN = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shared, dim=1)
        for x in (q_TKN.float(), k_TKN.float())
    )
    q_THN, v32_THV = q_THN * q_TKN.shape[2] ** -0.5, v_THV.float()
    decay_TH = torch.exp(-a_log_H.float().exp() * F.softplus(a_TH.float() + dt_bias_H.float()))
    beta_TH, out_THV = b_TH.float().sigmoid(), torch.zeros(v_THV.shape, device=v_THV.device)
    states = _begin(states_RHNV, rows_S, starts_S, sequences)
    for i, t in _tokens(lengths_S, starts_S):
        state = states[i] * decay_TH[t][..., None, None]
        seen = (state * k_THN[t].unsqueeze(-1)).sum(-2)
        change = (v32_THV[t] - seen) * beta_TH[t].unsqueeze(-1)
        states[i] = state + k_THN[t].unsqueeze(-1) * change.unsqueeze(-2)
        out_THV[t] = (states[i] * q_THN[t].unsqueeze(-1)).sum(-2)
    states_RHNV[rows_S] = states.to(states_RHNV.dtype)
    return out_THV.to(v_THV.dtype)


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
) -> torch.Tensor:
    """Returns the outputs of Mamba-2's state space, [T, H, V] (Dao & Gu 2024). `limits`: of dt after its
    softplus. Consecutive heads share a group's B and C."""
    rows_S, lengths_S, starts_S = _spans(sequences)
    shared = x_THV.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (x.float().repeat_interleave(shared, dim=1) for x in (b_TGN, c_TGN))
    dt_TH = F.softplus(dt_TH.float() + dt_bias_H.float()).clamp(*limits)
    decay_TH = torch.exp(-a_log_H.float().exp() * dt_TH)
    x32_THV = x_THV.float()
    out_THV = x32_THV * d_H.float()[:, None]
    states = _begin(states_RHVN, rows_S, starts_S, sequences)
    for i, t in _tokens(lengths_S, starts_S):
        added = (x32_THV[t] * dt_TH[t].unsqueeze(-1)).unsqueeze(-1) * b_THN[t].unsqueeze(-2)
        states[i] = states[i] * decay_TH[t][..., None, None] + added
        out_THV[t] += (states[i] * c_THN[t].unsqueeze(-2)).sum(-1)
    states_RHVN[rows_S] = states.to(states_RHVN.dtype)
    return out_THV.to(x_THV.dtype)


def gated_norm(
    x_TX: torch.Tensor, gate_TX: torch.Tensor, weight: torch.Tensor, eps: float, size: int, gate_first: bool
) -> torch.Tensor:
    """Returns x normed in parts of `size` numbers, and multiplied by silu(gate) before the norm or after it.
    `weight` is a part's or a token's."""
    x32, gate32 = x_TX.float(), F.silu(gate_TX.float())
    if gate_first:
        x32 = x32 * gate32
    parts = x32.unflatten(1, (-1, size))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).to(x_TX.dtype)
    weighted = normed * weight.view(-1, size)
    return (weighted.flatten(1) if gate_first else weighted.flatten(1) * gate32).to(x_TX.dtype)


def _spans(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, lengths and first tokens of the sequences that have tokens."""
    lengths_S = sequences.starts_S.diff().long()
    has_tokens = lengths_S > 0
    return (
        sequences.rows_S[has_tokens].long(),
        lengths_S[has_tokens],
        sequences.starts_S[:-1][has_tokens].long(),
    )


def _begin(
    memory: torch.Tensor, rows_S: torch.Tensor, starts_S: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The sequences' rows in float32; zeros for a sequence that begins."""
    rows = memory[rows_S].float()
    rows[sequences.positions_T[starts_S] <= 0] = 0.0
    return rows


def _tokens(lengths_S: torch.Tensor, starts_S: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sequences that have a token at each offset, with the indices of these tokens."""
    for offset in range(max(lengths_S.tolist(), default=0)):
        has_token = (lengths_S > offset).nonzero()[:, 0]
        yield has_token, starts_S[has_token] + offset
