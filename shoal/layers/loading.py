"""Shared steps of layers that load a checkpoint: the tensors that a layer asks for, and how it cuts and
copies its shard of each.

A checkpoint's names and shapes are said here and nowhere else: each layer lists its own tensors, whole, and a
model's list joins its layers' lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor

Loaded = torch.Tensor | QuantizedTensor


class CheckpointTensor(NamedTuple):
    """A tensor that a layer asks for. `load` takes it whole, under a name for errors, and keeps this rank's
    shard; it raises CheckpointError if the shape is another one."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[Loaded, str], None]


class LoadingLayer(nn.Module):
    """A module with weights of its own that come from a checkpoint."""

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        """The tensors of this module. `path` is the module's name in the checkpoint, without a parameter's
        name: "model.layers.0.mlp.down_proj"."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called when every tensor has come."""


def narrow(tensor: Loaded, dim: int, start: int, length: int) -> Loaded:
    """The slice [start, start + length) along `dim`. A quantized tensor stays quantized unless the cut goes
    through a group of columns."""
    if isinstance(tensor, QuantizedTensor):
        if (start, length) == (0, tensor.shape[dim]):
            return tensor
        if dim == 0:
            return tensor.rows(start, start + length)
        if start % tensor.group_size == 0 and length % tensor.group_size == 0:
            return tensor.columns(start, start + length)
        tensor = tensor.dequantize()
    return tensor.narrow(dim, start, length)


def copy_into(parameter: torch.Tensor, tensor: Loaded, name: str) -> None:
    """Copies a tensor, dequantized, into a parameter of the same shape. Raises CheckpointError that names
    both shapes."""
    check_shape(name, tuple(tensor.shape), tuple(parameter.shape))
    if isinstance(tensor, QuantizedTensor):
        tensor = tensor.dequantize(parameter.dtype, parameter.device)
    parameter.data.copy_(tensor)


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{name} has shape {list(found)}, but the config asks for {list(expected)}; is it another "
            "model's file?"
        )
