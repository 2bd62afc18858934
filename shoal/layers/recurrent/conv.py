"""ConvWeights: the weights of a causal depthwise convolution, whose channels are divided over the ranks; and
the sequences of a step as all recurrent layers take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from shoal.kernels.recurrent.sequences import Sequences
from shoal.layers.layer_step import StateStep
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into
from shoal.layers.parallel import TensorParallel


class ConvWeights(LoadingLayer):
    """`parts` are the channels of what the convolution runs over, such as q, k and v, each divided by itself.
    Where there are fewer units of a part than ranks, `replicas[i]` ranks have the same channels of part i. C
    channels on this rank, W width. `names`: in checkpoints each part is a tensor of its own, with
    this name in the place of the layer's."""

    def __init__(
        self,
        parts: Sequence[int],
        width: int,
        tp: TensorParallel,
        bias: bool,
        replicas: Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.tp, self.full_parts, self.width = tp, tuple(parts), width
        self.replicas, self.names = tuple(replicas or (1,) * len(parts)), tuple(names)
        self.parts = [size * same // tp.size for size, same in zip(parts, self.replicas)]
        self.weight_CW = nn.Parameter(torch.empty(sum(self.parts), width), requires_grad=False)
        self.bias_C = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if bias else None

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        if self.names:
            stem, start = path.rpartition(".")[0], 0
            for name, size, length in zip(self.names, self.full_parts, self.parts):
                shape, own = (size, 1, self.width), self.weight_CW[start : start + length]
                yield CheckpointTensor(f"{stem}.{name}.weight", shape, partial(self._load_part, own, shape))
                start += length
            return
        channels = sum(self.full_parts)
        shape = channels, 1, self.width
        yield CheckpointTensor(f"{path}.weight", shape, partial(self._load, self.weight_CW, shape))
        if self.bias_C is not None:
            yield CheckpointTensor(f"{path}.bias", (channels,), partial(self._load, self.bias_C, (channels,)))

    def _load_part(self, own: torch.Tensor, shape: tuple[int, ...], tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), shape)
        plain = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
        copy_into(own, plain[self.tp.rank * len(own) :][: len(own)].reshape(own.shape), name)

    def _load(self, parameter: torch.Tensor, shape: tuple[int, ...], tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), shape)
        plain = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize()
        start = own = 0
        for size, length, same in zip(self.full_parts, self.parts, self.replicas):
            shard = plain[start + self.tp.rank // same * length :][:length]
            target = parameter[own : own + length]
            copy_into(target, shard.reshape(target.shape), name)
            start, own = start + size, own + length


def sequences_of(step: StateStep) -> Sequences:
    """Returns the sequences of a layer's step."""
    given, drafts = step.input, step.memory.drafts
    spans = None if drafts is None else drafts.of(given.num_decodes, given.queries)
    return Sequences(given.rows_S, given.query_starts_S, given.positions_T, given.num_decodes, spans)
