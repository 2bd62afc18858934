"""AttentionBackend: the seam between the model and attention over the paged cache. select.py chooses
implementations.

Shapes: T tokens of the step, H query heads, G kv heads, N head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of a layer on one rank. Layers of the same shape share a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # the factor of q k^T
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) before the mask


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over the paged cache, for layers of one AttentionShape. Steps that
    share it must run one after the other."""

    captures_mixed: bool  # a mixed step may be captured, because `attend` needs no StepInput.host
    share_from: int | None  # from this many decodes on it makes use of StepInput.prefixes; None: never

    def begin(self, step: StepInput) -> None:
        """Plans what the layers of the step have in common. It is called once before the layers of an eager
        step, and once before the layers of a step that is captured, but not before a replay."""

    def reads_k(self, cache: LayerCache) -> bool:
        """Says if `attend` may read this step's k as it is passed, not from the cache alone."""
        ...

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor | None,
        v_TGN: torch.Tensor | None,
        cache: LayerCache,
        step: StepInput,
        selected: bool = False,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, N] for [T, H, N] queries. The cache holds the step's own k and v already; they are passed
        for fresh prefills, unless another layer stored them (None). A cache of fp8 numbers is read alone, so
        that a token sees the same keys and values in whatever step it is computed. With `selected`, only the
        results of step.host.selected_tokens are read. `sinks_H` float32: a logit of each query head that
        joins the denominator of its softmax."""
        ...


# By AttentionShape, or by the LatentKind of layers whose backend is a LatentBackend (latent.py).
Backends = Mapping[Hashable, Any]
