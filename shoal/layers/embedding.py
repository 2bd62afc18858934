"""The vocabulary's two ends: embedding and output head, split over ranks by vocabulary. A tied head is the
embedding itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kernels.quantized_tensor import QuantizedTensor
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into, narrow
from shoal.layers.parallel import TensorParallel


class Vocabulary(LoadingLayer):
    """A [V, D] matrix of which each rank holds V / size rows. Where V does not divide, the last rank's
    surplus rows are zero."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, ops: Ops, *, keep_quantized: bool = False
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.tp, self.ops, self.keep_quantized = tp, ops, keep_quantized
        self.shard = -(-vocab_size // tp.size)
        self.first = self.shard * tp.rank
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(self.shard, hidden_size), requires_grad=False
        )
        self.packed: Any = None  # kernels/cpu_linear.py's packed weights
        self.piece: QuantizedTensor | None = None

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", (self.vocab_size, self.hidden_size), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.vocab_size, self.hidden_size))
        rows = max(0, min(self.shard, self.vocab_size - self.first))
        shard = narrow(tensor, 0, min(self.first, self.vocab_size), rows)
        if self.keep_quantized and isinstance(shard, QuantizedTensor) and rows == self.shard:
            self.piece = shard
            return
        assert self.weight is not None
        self.weight[rows:].zero_()
        copy_into(self.weight[:rows], shard, name)

    def finish(self) -> None:
        """Packs a weight that stays quantized."""
        if self.piece is not None:
            from shoal.kernels import cpu_linear

            self.packed = cpu_linear.pack([self.piece], self.packed)
            self.weight = self.piece = None

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, D]."""
        if self.tp.size == 1:
            return self._rows(ids_T)
        local_T = ids_T - self.first
        foreign_T = (local_T < 0) | (local_T >= self.shard)
        x_TD = self._rows(local_T.masked_fill(foreign_T, 0))
        return self.tp.all_reduce(x_TD.masked_fill_(foreign_T.unsqueeze(1), 0))

    def _rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            from shoal.kernels import cpu_linear

            return cpu_linear.packed_embed(ids_T, self.packed)
        return self.ops.embed(ids_T, self.weight)  # type: ignore[arg-type]

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """[S, D] hidden states to [S, V] logits, whole on every rank."""
        if self.packed is not None:
            from shoal.kernels import cpu_linear

            logits_SV = cpu_linear.packed_linear(x_SD, self.packed, None)
        else:
            logits_SV = self.ops.linear(x_SD, self.weight, None)  # type: ignore[arg-type]
        if self.tp.size > 1:
            logits_SV = self.tp.all_gather(logits_SV, dim=-1)
        return logits_SV[:, : self.vocab_size]
