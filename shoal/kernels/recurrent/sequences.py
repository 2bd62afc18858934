"""`Sequences`: the sequences of a step, as the kernels of recurrent layers take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.draft_spans import DraftSpans


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """T tokens, S sequences. Sequence s has the tokens from starts_S[s] to starts_S[s + 1], and its states
    are in row rows_S[s]. It begins from zeros if its first token is at position 0 or is padding, whatever the
    row holds. The states after its last token are written to the row. A sequence without tokens is left
    alone, unless it has pending ones."""

    rows_S: torch.Tensor  # int32; -1: the spare row, the states' last one
    starts_S: torch.Tensor  # int32 [S + 1]
    positions_T: torch.Tensor  # int32; -1: padding
    num_decodes: int  # the first sequences, of one token each, or of as many as `drafts` says
    drafts: DraftSpans | None = None  # the decodes' drafts; None: without speculation
