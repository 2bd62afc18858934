"""Layouts of speculation that its kernels and the runner share: drafts and tokens by state row, what a step
reports of each sample, and the parameters of a look-up. There is no Triton here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Report(IntEnum):
    """The first int32s of what a step reports of a sequence that it samples from. The tokens follow, and the
    last K are the drafts that the next step may compute."""

    NUM_TOKENS = 0  # the tokens that count: the accepted drafts, and one more
    NUM_VERIFIED = 1  # the drafts that the step computed
    NUM_DRAFTS = 2  # the drafts that the next step may compute
    # Where the step computed no draft though there was one: 1 if the first one differs from what was
    # sampled in its place, 2 if it is the same. Otherwise 0.
    FIRST = 3


REPORT_SIZE = len(Report)
# In place of an entry's first place in the history (write_histories):
DRAFTS = -1  # its tokens are the row's drafts
EARLIER = -2  # its one token is the number of earlier tokens in the row's history


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Drafts and tokens of the state rows. The last row is spare, as in the batch state."""

    drafts_RK: torch.Tensor  # int32: the tokens drafted after a row's TOKEN, NUM_DRAFTS of them
    # int32: the row's last L tokens, of which the first ones may be of earlier answers. The token of position
    # p is at (earlier + p) % L.
    history_RL: torch.Tensor
    earlier_R: torch.Tensor  # int32: the number of tokens before the sequence's own


@dataclass(frozen=True, slots=True)
class LookUp:
    """Parameters of a look-up of drafts in a sequence's own tokens: the tokens after the earliest place where
    the longest possible suffix, of `min_match` to `max_match` tokens, stood before."""

    max_drafts: int
    min_match: int
    max_match: int


MOST_PLACES = 256
# On a GPU, a step with more tokens is bound by arithmetic, where drafts cost what they bring; and a batch
# with more decodes has more to gain from its graphs without drafts than from further ones.
MOST_VERIFIED, MOST_DECODES = 256, 64


def most_decodes(queries: int) -> int:
    """Returns the most decodes of `queries` tokens in a step on a GPU."""
    return min(MOST_DECODES, MOST_VERIFIED // queries)


@dataclass(frozen=True, slots=True)
class SuffixLookUp:
    """Parameters of a look-up that counts (SuffixDecoding, Oliaro et al. 2024). After each suffix of the
    sequence that stood before, drafts follow the most frequent continuation, up to `factor` times the length
    of the suffix, and `depth` tokens with it. They end where their estimated probability, the product of the
    shares of continuations, falls below `min_probability`. The suffix with the largest sum of these
    probabilities wins. Of each suffix the last MOST_PLACES places count, so that a look-up takes less than a
    millisecond."""

    max_drafts: int
    depth: int
    factor: float
    min_probability: float
