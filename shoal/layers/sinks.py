"""Sinks: the learned logits of a layer's query heads that join the denominators of their softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into, narrow
from shoal.layers.parallel import TensorParallel


class Sinks(LoadingLayer):
    """float32 logits of this rank's H query heads."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.num_heads, self.rank = num_heads, tp.rank
        self.logits_H = nn.Parameter(
            torch.empty(num_heads // tp.size, dtype=torch.float32), requires_grad=False
        )

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(path, (self.num_heads,), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.num_heads,))
        size = len(self.logits_H)
        copy_into(self.logits_H, narrow(tensor, 0, self.rank * size, size), name)
