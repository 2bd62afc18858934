"""HeadNumbers: one learned number for each head of a layer, such as the logits of attention sinks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into, narrow
from shoal.layers.parallel import TensorParallel


class HeadNumbers(LoadingLayer):
    """float32 numbers of this rank's H heads."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.num_heads, self.rank = num_heads, tp.rank
        self.values_H = nn.Parameter(
            torch.empty(num_heads // tp.size, dtype=torch.float32), requires_grad=False
        )

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(path, (self.num_heads,), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.num_heads,))
        size = len(self.values_H)
        copy_into(self.values_H, narrow(tensor, 0, self.rank * size, size), name)
