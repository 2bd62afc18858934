"""HeadNumbers: one learned number for each head of a layer, such as the logits of attention sinks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into
from shoal.layers.parallel import TensorParallel


class HeadNumbers(LoadingLayer):
    """float32 numbers of this rank's H heads. `shape`: the checkpoint's tensor's; None: it is a vector."""

    def __init__(self, num_heads: int, tp: TensorParallel, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.shape, self.rank = shape or (num_heads,), tp.rank
        self.values_H = nn.Parameter(
            torch.empty(num_heads // tp.size, dtype=torch.float32), requires_grad=False
        )

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(path, self.shape, self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), self.shape)
        plain = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
        size = len(self.values_H)
        copy_into(self.values_H, plain.flatten()[self.rank * size :][:size], name)
