"""`LayerStep`: what a layer reads of a step in addition to the hidden states. `Stream`: the hidden states, as
layers take and return them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

from shoal.attention.step_input import StepInput
from shoal.kernels.layer_cache import LayerCache, LayerMemory, LayerState

M = TypeVar("M", bound=LayerMemory)

# A sum that is still to be added to the residual (None: nothing), and the residual
Stream = tuple[torch.Tensor | None, torch.Tensor]


class LayerStep(NamedTuple, Generic[M]):
    input: StepInput
    memory: M
    cos_sin: torch.Tensor | None  # the table of the layer's rope; None: it has no rope
    select_S: torch.Tensor | None = None  # the tokens whose results are wanted, int64; None: all


CacheStep = LayerStep[LayerCache]
StateStep = LayerStep[LayerState]
