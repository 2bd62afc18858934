"""What a layer's mixture of experts is made of: the router's rule, the activation and the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:  # It needs Triton.
    from shoal.kernels.moe.packed_moe import PackedExperts


@dataclass(frozen=True, slots=True)
class Router:
    """How router logits become the experts of a token and their weights."""

    top_k: int
    renormalize: bool  # the weights of a token's experts sum to 1


@dataclass(frozen=True, slots=True)
class Activation:
    """What an expert makes of gate and up.

    silu, gelu_tanh: function(gate) * up.
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +- `limit`."""

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer. E experts · D hidden · F intermediate.

    Weights in fewer bits are one matrix of all experts' rows."""

    w13: torch.Tensor | PackedExperts  # [E, 2F, D], each expert's gate over its up
    w2: torch.Tensor | PackedExperts  # [E, D, F]
    b13: torch.Tensor | None = None  # [E, 2F]
    b2: torch.Tensor | None = None  # [E, D]
