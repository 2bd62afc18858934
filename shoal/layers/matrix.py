"""MatrixLayer: what layers with one matrix of weights share, linear ones and the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kernels.quantized_tensor import QuantizedTensor
from shoal.layers.loading import Loaded, LoadingLayer, copy_into
from shoal.layers.weight_format import PlainWeight, WeightFormat, pack


class MatrixLayer(LoadingLayer):
    """A layer with one matrix, [O, I] on this rank, that is merged of parts with `parts[i]` rows each.

    A subclass cuts its shard out of each part that comes (`_load_part`), and multiplies by `format`. Parts
    that come quantized stay so where the layer is told to keep them (`keep_quantized`, which a model sets
    before it loads). A merge of quantized and plain parts becomes plain.
    """

    def __init__(self, parts: Sequence[int], columns: int, ops: Ops) -> None:
        super().__init__()
        self.ops, self.parts, self.keep_quantized = ops, tuple(parts), False
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(sum(parts), columns), requires_grad=False)
        self.format: WeightFormat = PlainWeight(ops, self.weight)
        self._pieces: dict[int, QuantizedTensor] = {}

    def _load_part(self, part: int, shard: Loaded, name: str) -> None:
        """Takes the first rows of a part, or all of them. The others are zeros."""
        rows = self.parts[part]
        if self.keep_quantized and isinstance(shard, QuantizedTensor) and shard.shape[0] == rows:
            self._pieces[part] = shard
        else:
            target = self._part_of(self.weight, part)
            target[shard.shape[0] :].zero_()
            copy_into(target[: shard.shape[0]], shard, name)

    def _part_of(self, parameter: torch.Tensor | None, part: int) -> torch.Tensor:
        assert parameter is not None
        return parameter[sum(self.parts[:part]) :][: self.parts[part]]

    def finish(self) -> None:
        if len(self._pieces) == len(self.parts):
            self.format = pack([self._pieces[i] for i in range(len(self.parts))], self.ops, self.format)
            self.weight = None
        else:
            for part, piece in self._pieces.items():
                copy_into(self._part_of(self.weight, part), piece, "weight")
        self._pieces = {}
