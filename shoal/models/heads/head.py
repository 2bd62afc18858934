"""`DraftHead`: the protocol of heads, which draft the tokens after the next one from the hidden states of a
model, their target.

A head has decoder layers, with a cache of their own among the target's. Its slot S, at position S, takes the
embedding of token S + 1 and the target's hidden state of token S, and predicts token S + 2. From then on it
goes on alone: slot S + 1 takes what it predicted, and its own output.

T tokens · S sequences · X numbers of the target's hidden states that a head reads of a token · D its hidden
size · V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache
from shoal.model_config import LayerKind


class DraftHead(Protocol):
    """A module that runs after `allocate_ropes`, as a Decoder does."""

    kinds: tuple[LayerKind, ...]  # its layers
    # It reads the target's hidden states before these layers, side by side; none: the final ones.
    state_layers: tuple[int, ...]

    def allocate_ropes(self, max_position: int) -> None: ...

    def fuse(self, states_TX: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as the head's layers take them, [T, D]."""

    def forward(
        self,
        token_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        step: StepInput,
        caches: Sequence[LayerCache],
        select_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs slots, which are the tokens of `step` but for token_ids_T, the tokens after them. Returns what
        `logits` takes, and the hidden states with which the next slots begin, both [T, D], or [S, D] of the
        slots in `select_S` (int64). hidden_TD may be changed."""

    def logits(self, normed_SD: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, [S, V], on every rank; -inf for tokens that it never drafts."""
