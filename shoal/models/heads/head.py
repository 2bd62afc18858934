"""`DraftHead`: the base class of heads, which draft the tokens after the next one from the hidden states of a
model, their target.

A head has decoder layers, with a cache of their own among the target's. Its slot S, at position S, takes the
embedding of token S + 1 and the target's hidden state of token S, and predicts token S + 2. From then on it
continues alone: slot S + 1 takes what it predicted, and its own output.

T tokens · S sequences · X numbers of the target's hidden states that a head reads of a token · D its hidden
size · V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache
from shoal.model_config import LayerKind
from shoal.models.decoder import rope_table


class DraftHead(nn.Module):
    """A module that runs after `allocate_ropes`, as a Decoder does, and is built under the device and the
    default dtype of the engine."""

    def __init__(self, kinds: tuple[LayerKind, ...], state_layers: tuple[int, ...] = ()) -> None:
        """`kinds`: the head's layers. It reads the target's hidden states before `state_layers`, side by
        side; none: the final ones."""
        super().__init__()
        self.kinds, self.state_layers = kinds, state_layers
        self.ropes: tuple[torch.Tensor | None, ...] = ()

    def allocate_ropes(self, max_position: int) -> None:
        """Makes the tables of rotary angles, for as many positions as the target has, which may be more than
        a head's config says."""
        attentions = [kind.attention for kind in self.kinds]
        self.ropes = tuple(None if a is None else rope_table(a, max_position) for a in attentions)

    def fuse(self, states_TX: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as `forward` takes them, [T, D]."""
        return states_TX

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
        raise NotImplementedError

    def logits(self, normed_SD: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary, [S, V], on every rank; -inf for tokens that it never drafts."""
        raise NotImplementedError
