"""The vocabulary's two ends: embedding and output head, split over ranks by vocabulary. A tied head is the
embedding itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.kernels.ops import Ops
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, narrow
from shoal.layers.matrix import MatrixLayer
from shoal.layers.parallel import TensorParallel


class Vocabulary(MatrixLayer):
    """A [V, D] matrix of which each rank holds V / size rows. Where V does not divide, the last rank's
    surplus rows are zero."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, ops: Ops) -> None:
        self.shard = -(-vocab_size // tp.size)
        super().__init__([self.shard], hidden_size, ops)
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.first = self.shard * tp.rank

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", (self.vocab_size, self.hidden_size), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.vocab_size, self.hidden_size))
        rows = max(0, min(self.shard, self.vocab_size - self.first))
        shard = narrow(tensor, 0, min(self.first, self.vocab_size), rows)
        self._load_part(0, shard, name)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, D]."""
        if self.tp.size == 1:
            return self.format.embed(ids_T)
        local_T = ids_T - self.first
        foreign_T = (local_T < 0) | (local_T >= self.shard)
        x_TD = self.format.embed(local_T.masked_fill(foreign_T, 0))
        return self.tp.all_reduce(x_TD.masked_fill_(foreign_T.unsqueeze(1), 0))

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """[S, D] hidden states to [S, V] logits, whole on every rank."""
        logits_SV = self.format.multiply(x_SD, None)
        if self.tp.size > 1:
            logits_SV = self.tp.all_gather(logits_SV, dim=-1)
        return logits_SV[:, : self.vocab_size]
