"""The weights of a layer's mixture of experts. Its numbers are in kinds/experts.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:  # It needs Triton.
    from shoal.kernels.moe.packed_experts import PackedExperts


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer. E experts · D hidden · F intermediate.

    Weights in fewer bits are one matrix of all experts' rows."""

    w13: (
        torch.Tensor | PackedExperts
    )  # [E, 2F, D], each expert's gate over its up, or [E, F, D], its up alone
    w2: torch.Tensor | PackedExperts  # [E, D, F]
    b13: torch.Tensor | None = None  # [E, 2F] or [E, F]
    b2: torch.Tensor | None = None  # [E, D]


class RouterTensors(NamedTuple):
    """A checkpoint's tensors for a router's rule, in float32."""

    correction_E: torch.Tensor | None = None
    expert_scale_E: torch.Tensor | None = None


NO_TENSORS = RouterTensors()
