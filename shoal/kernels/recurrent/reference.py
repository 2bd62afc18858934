"""Recurrent layers in plain PyTorch: the oracle of this room's kernels, and the CPU's ops where there are no
faster ones. Sums and states are computed in float32; states are stored in the dtype of their rows.

T tokens · S sequences · C channels of a convolution · W its width · K key heads · H (value) heads · N numbers
of a key · V numbers of a value · G groups of heads · R state rows, with the spare one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

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
    kept_RKC: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the depthwise convolution of each sequence, [T, C], through silu if asked. The last tap
    belongs to the token itself. `inputs_RCW` holds the W - 1 inputs before the step's, the oldest first, and
    is overwritten with the step's last ones. `kept_RKC`: kept inputs of drafts (DraftSpans)."""
    spans = _Spans(sequences, kept_RKC)
    x_EC = spans.with_pending(x_TC)
    width = weight_CW.shape[1]
    before_SWC = spans.begin(inputs_RCW).transpose(1, 2)
    sequence_E = torch.repeat_interleave(torch.arange(len(spans.rows_S), device=x_TC.device), spans.lengths_S)
    # Each sequence has W - 1 inputs from before the step; the step's own inputs follow.
    inputs = torch.cat((before_SWC.flatten(0, 1).to(x_TC.dtype), x_EC))

    def input_at(sequence: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """The inputs of sequences at offsets from their first tokens, which are -(W - 1) at least."""
        old = sequence * (width - 1) + width - 1 + offset
        new = before_SWC.shape[0] * (width - 1) + spans.starts_S[sequence] + offset
        return inputs[torch.where(offset < 0, old, new)]

    offset_E = torch.arange(len(sequence_E), device=x_TC.device) - spans.starts_S[sequence_E]
    sums_EC = torch.zeros(len(sequence_E), x_TC.shape[1], dtype=torch.float32, device=x_TC.device)
    for tap in range(width):
        taken = input_at(sequence_E, offset_E - (width - 1) + tap)
        sums_EC += weight_CW[:, tap].float() * taken.float()
    if bias_C is not None:
        sums_EC += bias_C.float()
    each_S = torch.arange(len(spans.rows_S), device=x_TC.device)
    stored_S = spans.stored_S + 1 - (width - 1)
    last_SWC = torch.stack([input_at(each_S, stored_S + i) for i in range(width - 1)], dim=1)
    inputs_RCW[spans.rows_S] = last_SWC.transpose(1, 2).to(inputs_RCW.dtype)
    spans.keep(x_TC)
    return spans.own(F.silu(sums_EC) if silu else sums_EC, torch.zeros_like(x_TC))


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
    """Returns the gated delta rule's outputs, [T, H, V] (Yang 2024). q and k are divided by their norms, and
    q by the root of N. Consecutive value heads share a key head. `kept_RKX`: k, v, a and b of drafts
    (DraftSpans). In Kimi Linear a and dt_bias have a number for each channel of a key, a_THN and dt_bias_HN,
    by which that channel of the state forgets."""
    spans = _Spans(sequences, kept_RKX)
    q_TKN = spans.with_blanks(q_TKN)
    k_EKN, v_EHV, a_EH, b_EH = spans.with_pending(k_TKN, v_THV, a_TH, b_TH)
    shared = v_THV.shape[1] // q_TKN.shape[1]
    q_EHN, k_EHN = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shared, dim=1)
        for x in (q_TKN.float(), k_EKN.float())
    )
    q_EHN, v32_EHV = q_EHN * q_TKN.shape[2] ** -0.5, v_EHV.float()
    heads, steps_EHX = v_THV.shape[1], F.softplus(a_EH.float() + dt_bias_H.float())
    steps_EHX = steps_EHX.view(-1, heads, dt_bias_H.numel() // heads)
    decay_EHX = torch.exp(-a_log_H.float().exp()[:, None] * steps_EHX)
    beta_EH = b_EH.float().sigmoid()
    out_EHV = torch.zeros(v_EHV.shape, dtype=torch.float32, device=v_THV.device)
    states = spans.begin(states_RHNV)
    for i, t in spans.tokens():
        state = states[i] * decay_EHX[t].unsqueeze(-1)
        seen = (state * k_EHN[t].unsqueeze(-1)).sum(-2)
        change = (v32_EHV[t] - seen) * beta_EH[t].unsqueeze(-1)
        states[i] = state + k_EHN[t].unsqueeze(-1) * change.unsqueeze(-2)
        out_EHV[t] = (states[i] * q_EHN[t].unsqueeze(-1)).sum(-2)
        spans.store(states, i, t, states_RHNV)
    spans.keep(k_TKN, v_THV, a_TH, b_TH)
    return spans.own(out_EHV, torch.zeros_like(v_THV))


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
    """Returns the outputs of Mamba-2's state space, [T, H, V] (Dao & Gu 2024). `limits`: of dt after its
    softplus. Consecutive heads share a group's B and C. `kept_RKX`: x, B and dt of drafts (DraftSpans)."""
    spans = _Spans(sequences, kept_RKX)
    x_EHV, b_EGN, dt_EH = spans.with_pending(x_THV, b_TGN, dt_TH)
    shared = x_THV.shape[1] // b_TGN.shape[1]
    b_EHN, c_EHN = (x.float().repeat_interleave(shared, dim=1) for x in (b_EGN, spans.with_blanks(c_TGN)))
    dt_EH = F.softplus(dt_EH.float() + dt_bias_H.float()).clamp(*limits)
    decay_EH = torch.exp(-a_log_H.float().exp() * dt_EH)
    x32_EHV = x_EHV.float()
    out_EHV = x32_EHV * d_H.float()[:, None]
    states = spans.begin(states_RHVN)
    for i, t in spans.tokens():
        added = (x32_EHV[t] * dt_EH[t].unsqueeze(-1)).unsqueeze(-1) * b_EHN[t].unsqueeze(-2)
        states[i] = states[i] * decay_EH[t][..., None, None] + added
        out_EHV[t] += (states[i] * c_EHN[t].unsqueeze(-2)).sum(-1)
        spans.store(states, i, t, states_RHVN)
    spans.keep(x_THV, b_TGN, dt_TH)
    return spans.own(out_EHV, torch.zeros_like(x_THV))


def gated_norm(
    x_TX: torch.Tensor,
    gate_TX: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    size: int,
    gate_first: bool,
    activation: str = "silu",
) -> torch.Tensor:
    """Returns x normed in parts of `size` numbers, and multiplied by silu(gate) or sigmoid(gate) before the
    norm or after it. `weight` is a part's or a token's."""
    x32, gate32 = x_TX.float(), (F.silu if activation == "silu" else torch.sigmoid)(gate_TX.float())
    if gate_first:
        x32 = x32 * gate32
    parts = x32.unflatten(1, (-1, size))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).to(x_TX.dtype)
    weighted = normed * weight.view(-1, size)
    return (weighted.flatten(1) if gate_first else weighted.flatten(1) * gate32).to(x_TX.dtype)


class _Spans:
    """The sequences that have tokens, of this step or pending. The E tokens are the pending ones of each
    sequence, each followed by its own; `starts_S` and `lengths_S` count them. The state after a sequence's
    token stored_S[s] is stored."""

    def __init__(self, sequences: Sequences, kept_RKX: torch.Tensor | None) -> None:
        drafts, device = sequences.drafts, sequences.rows_S.device
        firsts, ends = sequences.starts_S[:-1].clone().long(), sequences.starts_S[1:].long()
        pending, stored = torch.zeros_like(firsts), ends - firsts - 1
        if drafts is not None:
            assert kept_RKX is not None
            own = slice(len(drafts.verified_B))
            firsts[own] = torch.maximum(ends[own] - 1 - drafts.verified_B, firsts[own])
            pending[own] = drafts.pending_B.long()
            stored[own] = pending[own] - (drafts.verified_B < 0).long()
        self._sequences, self._kept_RKX = sequences, kept_RKX
        [self._of_S] = (ends - firsts + pending > 0).nonzero(as_tuple=True)
        self._firsts_S, self._pending_S = firsts[self._of_S], pending[self._of_S]
        self._has_own_S = ends[self._of_S] > self._firsts_S
        self.rows_S, self.stored_S = sequences.rows_S[self._of_S].long(), stored[self._of_S]
        self.lengths_S = ends[self._of_S] - self._firsts_S + self._pending_S
        self.starts_S = self.lengths_S.cumsum(0) - self.lengths_S
        # the index in T of each of the E tokens; -1: it is pending
        indices: list[int] = []
        for first, count, length in zip(
            *(x.tolist() for x in (self._firsts_S, self._pending_S, self.lengths_S))
        ):
            indices += [*[-1] * count, *range(first, first + length - count)]
        self._index_E = torch.tensor(indices, dtype=torch.long, device=device)

    def with_blanks(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Returns x of the E tokens, zeros where they are pending."""
        out_EX = x_TX.new_zeros(len(self._index_E), *x_TX.shape[1:])
        is_own = self._index_E >= 0
        out_EX[is_own] = x_TX[self._index_E[is_own]]
        return out_EX

    def with_pending(self, *pieces: torch.Tensor) -> Any:
        """Returns these inputs of the E tokens: one tensor, or as many as are given."""
        out = [self.with_blanks(piece) for piece in pieces]
        drafts = self._sequences.drafts
        if drafts is not None and self._kept_RKX is not None:
            sizes = [math.prod(piece.shape[1:]) for piece in pieces]
            for s, count in enumerate(self._pending_S.tolist()):
                if count == 0:
                    continue
                end = int(drafts.starts_B[self._of_S[s]])
                slots = torch.arange(end - count, end, device=self._index_E.device) % self._kept_RKX.shape[1]
                own = slice(int(self.starts_S[s]), int(self.starts_S[s]) + count)
                for piece, kept in zip(out, self._kept_RKX[self.rows_S[s], slots].split(sizes, dim=1)):
                    piece[own] = kept.view(count, *piece.shape[1:]).to(piece.dtype)
        return out if len(out) > 1 else out[0]

    def begin(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the sequences' rows in float32; zeros for a sequence that begins."""
        rows = memory[self.rows_S].float()
        has_own = self._has_own_S
        rows[has_own.nonzero()[:, 0][self._sequences.positions_T[self._firsts_S[has_own]] <= 0]] = 0.0
        return rows

    def tokens(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the sequences that have a token at each offset, with the indices of these tokens."""
        for offset in range(max(self.lengths_S.tolist(), default=0)):
            has_token = (self.lengths_S > offset).nonzero()[:, 0]
            yield has_token, self.starts_S[has_token] + offset

    def store(self, states: torch.Tensor, i: torch.Tensor, t: torch.Tensor, memory: torch.Tensor) -> None:
        """Stores the states of the sequences `i` whose token `t` is the one after which the state is stored.
        With drafts, decodes round each state as if it was stored."""
        offsets = t - self.starts_S[i]
        due = i[offsets == self.stored_S[i]]
        memory[self.rows_S[due]] = states[due].to(memory.dtype)
        if self._sequences.drafts is not None:
            decodes = i[self._of_S[i] < len(self._sequences.drafts.verified_B)]
            states[decodes] = states[decodes].to(memory.dtype).float()

    def keep(self, *pieces: torch.Tensor) -> None:
        """Keeps these inputs of the step's drafts."""
        drafts = self._sequences.drafts
        if drafts is None or self._kept_RKX is None:
            return
        flat_TX = torch.cat([piece.flatten(1).to(self._kept_RKX.dtype) for piece in pieces], dim=1)
        ends = self._sequences.starts_S[1:].tolist()
        rows = self._sequences.rows_S.tolist()
        for s, (start, verified) in enumerate(zip(drafts.starts_B.tolist(), drafts.verified_B.tolist())):
            for j in range(1, verified + 1):
                slot = (start + j) % self._kept_RKX.shape[1]
                self._kept_RKX[rows[s], slot] = flat_TX[ends[s] - 1 - verified + j]

    def own(self, x_EX: torch.Tensor, out_TX: torch.Tensor) -> torch.Tensor:
        """Writes x of the step's own tokens to `out_TX`, and returns it."""
        is_own = self._index_E >= 0
        out_TX[self._index_E[is_own]] = x_EX[is_own].to(out_TX.dtype)
        return out_TX
