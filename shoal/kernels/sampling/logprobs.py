"""Log-probabilities of rows of logits, and which tokens their filters leave. Plain PyTorch, for any device.

S sampled sequences · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Columns:
    """A part of the columns of logits: the token of the first one, how many the widest part has, and what
    joins all parts' tensors, [S, n] each, side by side."""

    first: int
    width: int
    gather: Callable[[torch.Tensor], torch.Tensor]


def keep_survivors(
    logits_SV: torch.Tensor,
    tokens_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
) -> torch.Tensor:
    """Returns logits, already divided by their temperature, in which the tokens that min_p, top_k and top_p
    exclude from a draw are impossible, by the rules of `survivors` (reference.py).

    tokens_S, the sampled tokens, stay possible: a draw may round the mass of a token at the edge of top_p in
    another way.
    """
    ordered_SV = logits_SV.sort(dim=-1, descending=True).values
    floor_S1 = ordered_SV[:, :1] + min_p_S.log().unsqueeze(1)
    k_S1 = torch.where(top_k_S > 0, top_k_S, logits_SV.shape[1]).clamp(max=logits_SV.shape[1]).unsqueeze(1)
    floor_S1 = torch.maximum(floor_S1, ordered_SV.gather(1, k_S1.long() - 1))
    kept_SV = ordered_SV.masked_fill(ordered_SV < floor_S1, -math.inf)
    mass_SV = kept_SV.softmax(dim=-1)
    more_probable_SV = mass_SV.cumsum(dim=-1) - mass_SV
    is_kept_SV = (more_probable_SV < top_p_S.unsqueeze(1)) | (top_p_S.unsqueeze(1) >= 1.0)
    floor_S1 = kept_SV.masked_fill(~is_kept_SV, math.inf).amin(dim=-1, keepdim=True).maximum(floor_S1)
    floor_S1 = torch.minimum(floor_S1, logits_SV.gather(1, tokens_S.long().unsqueeze(1)))
    return logits_SV.masked_fill(logits_SV < floor_S1, -math.inf)


def logprobs(
    logits_SV: torch.Tensor, token_ids_S: torch.Tensor, k: int, columns: Columns | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns four results of log_softmax(logits): the given tokens' values [S], their ranks [S], the ids of
    the k best tokens [S, k] and their values [S, k].

    A rank is the number of tokens that are at least as probable, the token itself included. The best is 1.

    The logits may cover `columns` alone. The ranks with the other columns then make the same call and get the
    same results.
    """
    part = columns or Columns(0, logits_SV.shape[1], lambda x: x)
    logits_SV = logits_SV.float()
    local_S1 = token_ids_S.long().unsqueeze(1) - part.first
    is_here_S1 = (local_S1 >= 0) & (local_S1 < logits_SV.shape[1])
    chosen_S1 = logits_SV.gather(1, local_S1.clamp(0, logits_SV.shape[1] - 1))
    chosen_S1 = chosen_S1.masked_fill(~is_here_S1, -math.inf)
    sums_S1 = logits_SV.logsumexp(dim=-1, keepdim=True)
    chosen_SR, sums_SR = part.gather(torch.cat((chosen_S1, sums_S1), dim=1)).unflatten(1, (-1, 2)).unbind(2)
    chosen_S1, sums_S1 = chosen_SR.amax(dim=-1, keepdim=True), sums_SR.logsumexp(dim=-1, keepdim=True)
    ranks_S = part.gather((logits_SV >= chosen_S1).sum(dim=-1, keepdim=True)).sum(dim=-1)
    best = logits_SV.topk(min(k, logits_SV.shape[1]), dim=-1)
    missing = 0, min(k, part.width) - best.values.shape[1]
    values = part.gather(F.pad(best.values, missing, value=-math.inf))
    ids = part.gather(F.pad(best.indices + part.first, missing))
    top = values.topk(k, dim=-1)
    return ((chosen_S1 - sums_S1).squeeze(1), ranks_S, ids.gather(1, top.indices), top.values - sums_S1)
