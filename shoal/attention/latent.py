"""LatentBackend: the seam between layers/latent.py and attention over a cache of latents, and the choice of
its form. latent_select.py chooses implementations.

T tokens of the step, H query heads of this rank. kernels/latent/reference.py says what the forms are, and
what the other dimensions mean.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.latent import LatentKind


class LatentBackend(Protocol):
    """As AttentionBackend, for layers of one LatentKind, whose heads are one rank's."""

    captures_mixed: bool
    share_from: int | None

    def begin(self, step: StepInput) -> None: ...

    def attend(
        self,
        q_THX: torch.Tensor,
        latent_TN: torch.Tensor,
        kv_b_HWC: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        step: StepInput,
    ) -> torch.Tensor:
        """[T, H, V] for queries as their projection leaves them. latent_TN are the step's own latents, which
        the cache holds already."""
        ...


def is_expanded_cheaper(kind: LatentKind, num_queries: int, num_keys: int) -> bool:
    """Says which form takes fewer operations for the last `num_queries` of `num_keys` positions."""
    projection = kind.kv_lora_rank * (kind.qk_nope_head_dim + kind.v_head_dim)  # what a query costs, or a key
    pairs = num_queries * (num_keys - num_queries // 2)
    absorbed = num_queries * projection + pairs * (2 * kind.kv_lora_rank + kind.qk_rope_head_dim)
    expanded = num_keys * projection + pairs * (kind.query_dim + kind.v_head_dim)
    return expanded < absorbed
