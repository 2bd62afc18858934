"""The vocabulary's two ends: embedding and output head, split over ranks by vocabulary. A tied head is the
embedding itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from shoal.kernels.ops import Ops
from shoal.kernels.sampling.logprobs import Columns
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, narrow
from shoal.layers.matrix import MatrixLayer
from shoal.layers.parallel import TensorParallel


class Vocabulary(MatrixLayer):
    """A [V, D] matrix; each rank holds V / size of its rows, from `first` on. Where V does not divide, the
    last rank's surplus rows are zero."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, ops: Ops) -> None:
        self.shard = -(-vocab_size // tp.size)
        super().__init__([self.shard], hidden_size, ops)
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.first = self.shard * tp.rank
        self.num_own = max(0, min(self.shard, vocab_size - self.first))  # tokens of this rank

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{path}.weight", (self.vocab_size, self.hidden_size), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.vocab_size, self.hidden_size))
        self._load_part(0, narrow(tensor, 0, self.first, self.num_own), name)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, D]."""
        if self.tp.size == 1:
            return self.format.embed(ids_T)
        local_T = ids_T - self.first
        foreign_T = (local_T < 0) | (local_T >= self.shard)
        x_TD = self.format.embed(local_T.masked_fill(foreign_T, 0))
        return self.tp.all_reduce(x_TD.masked_fill_(foreign_T.unsqueeze(1), 0))

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """[S, D] hidden states to the logits of this rank's tokens, [S, V / size]."""
        return self.format.matmul(x_SD, None)[:, : self.num_own]

    def columns(self) -> Columns:
        """The columns of the vocabulary that `logits` returns."""
        return Columns(self.first, self.shard, self.tp.all_gather)

    def whole(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' tokens, [S, V], on every rank."""
        if self.tp.size == 1:
            return logits_SV
        padded_SV = F.pad(logits_SV, (0, self.shard - self.num_own))
        return self.tp.all_gather(padded_SV, dim=-1)[:, : self.vocab_size]
