"""MatrixLayer: what layers with one matrix of weights share, linear ones and the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor, is_projection
from shoal.layers.loading import Loaded, LoadingLayer, copy_into
from shoal.layers.packed_weight import PackedWeight, is_multiplied, pack
from shoal.layers.weight_format import PlainWeight, WeightFormat

# From a matrix's outputs and inputs, a device and a generator of it to such a matrix of random numbers.
MakesUp = Callable[[int, int, torch.device, torch.Generator], QuantizedTensor]
Holding = Callable[[], AbstractContextManager[None]]  # makes a context in which weights get their memory


class MatrixLayer(LoadingLayer):
    """One [O, I] weight on this rank, made of stacked parts of `parts[i]` rows.

    A subclass cuts its shard out of each part that comes (`_load_part`), and multiplies by `format`. Parts
    that come quantized stay so after `keep`. A merge of quantized and plain
    parts becomes plain.
    """

    def __init__(self, parts: Sequence[int], columns: int, ops: Ops) -> None:
        super().__init__()
        # How many parts are an expert's, in a matrix of several experts that kernels take as one.
        self.ops, self.parts, self.num_columns, self.per_expert = ops, tuple(parts), columns, 0
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(sum(parts), columns), requires_grad=False)
        self.format: WeightFormat = PlainWeight(ops, self.weight)
        self.device, self.dtype = self.weight.device, self.weight.dtype
        self.keep_quantized = self.quantizes = False
        self.holding: Holding = nullcontext
        self._quantized_parts: dict[int, QuantizedTensor] = {}

    def keep(self, device: torch.device, quantizes: bool = False, holding: Holding = nullcontext) -> None:
        """Keeps quantized checkpoint tensors quantized. With `quantizes`, plain matrices of attention,
        MLPs and experts become fp8 first. The matrix gets memory on `device`, inside of `holding`, when it is
        known which of the two it becomes: there may be no room for a model in plain numbers."""
        self.keep_quantized, self.quantizes, self.device, self.holding = True, quantizes, device, holding
        self.weight, self.format = None, WeightFormat(self.ops)

    def plain_weight(self) -> torch.Tensor:
        """The matrix in plain numbers."""
        if self.weight is None:
            with self.holding():
                empty = torch.empty(sum(self.parts), self.num_columns, dtype=self.dtype, device=self.device)
            self.weight = nn.Parameter(empty, requires_grad=False)
            self.format = PlainWeight(self.ops, self.weight)
        return self.weight

    def load_dummy(self, path: str, generator: torch.Generator, quantized: MakesUp | None = None) -> None:
        """Makes up what becomes fp8, and with `quantized` what a checkpoint has in fewer bits. Other weights
        are parameters, which the model makes up."""
        tensors = [tensor for tensor in self.checkpoint_tensors(path) if is_projection(tensor.name)]
        if not (self.quantizes or (self.keep_quantized and quantized)) or not tensors:
            self.plain_weight()
            return
        for tensor in tensors:
            if self.quantizes or quantized is None:
                plain = torch.empty(tensor.shape, dtype=self.dtype, device=self.device)
                tensor.load(plain.uniform_(-0.02, 0.02, generator=generator), tensor.name)
            else:
                outs, inputs = tensor.shape
                tensor.load(quantized(outs, inputs, self.device, generator), tensor.name)

    def _load_part(self, part: int, shard: Loaded, name: str) -> None:
        """Takes the first rows of a part, or all of them. The others are zeros."""
        if self.quantizes and is_projection(name) and isinstance(shard, torch.Tensor):
            shard = Fp8Tensor.rounded(shard.to(self.device))
        whole = shard.shape[0] == self.parts[part]
        if (
            self.keep_quantized
            and isinstance(shard, QuantizedTensor)
            and whole
            and is_multiplied(shard, self.device)
            # parts that are stored in different layouts become plain
            and all(shard.fits(other) for other in self._quantized_parts.values())
        ):
            self._quantized_parts[part] = shard
            if len(self._quantized_parts) == len(self.parts):
                self._pack()
        else:
            target = self._part_of(self.plain_weight(), part)
            target[shard.shape[0] :].zero_()
            copy_into(target[: shard.shape[0]], shard, name)

    def _part_of(self, parameter: torch.Tensor | None, part: int) -> torch.Tensor:
        assert parameter is not None
        return parameter[sum(self.parts[:part]) :][: self.parts[part]]

    def _pack(self) -> None:
        pieces = [self._quantized_parts[i] for i in range(len(self.parts))]
        with self.holding():
            self.format = pack(pieces, self.ops, self.format, self.device, self.dtype, self.per_expert)
        self.weight, self._quantized_parts = None, {}

    def finish(self) -> None:
        for part, piece in self._quantized_parts.items():
            if isinstance(self.format, PackedWeight):  # Some parts of a merge came again.
                self.format.write(sum(self.parts[:part]), piece)
            else:
                copy_into(self._part_of(self.weight, part), piece, "weight")
        self._quantized_parts = {}
