"""`Sequences`: the sequences of a step, as the kernels of recurrent layers take them. `DraftSpans`: which of
their tokens are drafts, and which states lag behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DraftSpans:
    """The tokens of B decodes with drafts. A draft may be rejected, so a decode's states are stored after its
    first token, which is certain. Inputs of its drafts are kept: the input of the token at position p in slot
    p % slots of the row. The next step first applies the inputs of the drafts that were accepted.

    Decode b has the last verified_B[b] + 1 of its places for tokens; the places before them are padding."""

    starts_B: torch.Tensor  # int32: the position of its first token
    verified_B: torch.Tensor  # int32: the drafts after it; -1: no token at all
    pending_B: torch.Tensor  # int32: how many tokens before starts_B are kept and not applied yet
    queries: int  # places for tokens of each decode

    def of(self, num_decodes: int, queries: int) -> DraftSpans:
        """Returns the spans of a step with fewer decodes."""
        starts_B, verified_B, pending_B = self.starts_B, self.verified_B, self.pending_B
        return DraftSpans(starts_B[:num_decodes], verified_B[:num_decodes], pending_B[:num_decodes], queries)


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
