"""Logits of the rare rows that ask for more than `sample` knows: penalties, bias, bans, log-probabilities.

Plain PyTorch, on any device; masks of grammars are an op of each kind of device (`keep_bits`).

Meanings and order are vLLM's. P: rows with penalties · S: sampled sequences · V: vocabulary. Functions ending
in a verb's object (`ban`, `add_bias`, `keep_only`) change the logits in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def keep_only(logits_SV: torch.Tensor, allowed: Iterable[tuple[int, torch.Tensor]]) -> None:
    """For each (row, int64 token ids): every other token of that row becomes impossible."""
    for row, ids in allowed:
        kept = logits_SV[row, ids]
        logits_SV[row] = -math.inf
        logits_SV[row, ids] = kept


def add_bias(logits_SV: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], ids[i]] += values[i]; a pair that comes twice adds twice."""
    logits_SV.index_put_((rows, ids), values.to(logits_SV.dtype), accumulate=True)


def ban(logits_SV: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Token ids[i] becomes impossible in row rows[i]."""
    logits_SV[rows, ids] = -math.inf


def penalize(
    logits_PV: torch.Tensor,
    prompt_mask_PV: torch.Tensor,
    output_counts_PV: torch.Tensor,
    repetition_P: torch.Tensor,
    presence_P: torch.Tensor,
    frequency_P: torch.Tensor,
) -> torch.Tensor:
    """New logits. repetition: logits of tokens seen (prompt or output) are divided by it if positive, else
    multiplied.

    presence is subtracted once and frequency per occurrence, both for output tokens only.
    """
    in_output_PV = output_counts_PV > 0
    factor_PV = torch.where(prompt_mask_PV | in_output_PV, repetition_P.unsqueeze(1), 1.0)
    logits_PV = torch.where(logits_PV > 0, logits_PV / factor_PV, logits_PV * factor_PV)
    return logits_PV - frequency_P.unsqueeze(1) * output_counts_PV - presence_P.unsqueeze(1) * in_output_PV


def logprobs(
    logits_SV: torch.Tensor, token_ids_S: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of log_softmax(logits): the given tokens' values and ranks [S], the k best ids and their values [S, k].

    A rank counts the tokens at least as probable, the token itself included: 1 is the best.
    """
    logprobs_SV = logits_SV.float().log_softmax(dim=-1)
    chosen_S1 = logprobs_SV.gather(1, token_ids_S.long().unsqueeze(1))
    ranks_S = (logprobs_SV >= chosen_S1).sum(dim=-1)
    top = logprobs_SV.topk(k, dim=-1)
    return chosen_S1.squeeze(1), ranks_S, top.indices, top.values
