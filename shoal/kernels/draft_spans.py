"""`DraftSpans`: which tokens of a step are drafts, and how many accepted ones the recurrent states lack."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class DraftSpans:
    """The tokens of B decodes with drafts. A draft may be rejected, so a decode's states are stored after its
    first token, which is certain. The inputs of its drafts are kept, in slot p % slots of the row for
    position p. The next step first applies the inputs of the drafts that were accepted.

    Decode b has the last verified_B[b] + 1 of its places for tokens; the places before them are padding."""

    starts_B: torch.Tensor  # int32: the position of its first token
    verified_B: torch.Tensor  # int32: the drafts after it; -1: no token at all
    pending_B: torch.Tensor  # int32: the number of tokens before starts_B whose inputs are not applied yet
    queries: int  # places for tokens of each decode

    def of(self, num_decodes: int, queries: int) -> DraftSpans:
        """Returns the spans of a step with fewer decodes."""
        starts_B, verified_B, pending_B = self.starts_B, self.verified_B, self.pending_B
        return DraftSpans(starts_B[:num_decodes], verified_B[:num_decodes], pending_B[:num_decodes], queries)
