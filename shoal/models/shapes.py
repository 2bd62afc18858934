"""The tensors that a checkpoint of a config holds, and how many weights they are, before anything is made for
them.

Both come from the modules themselves, which are built without memory (on torch's meta device). Nothing is
computed there, as the first computation on that device imports hundreds of modules. A config that lies costs
little: one layer is built of each kind, and shapes come one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from shoal.attention.cpu import TorchBackend
from shoal.kernels import reference
from shoal.kernels.ops import Ops
from shoal.layers.attention import attention_shape
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder, checkpoint_tensors
from shoal.models.layer import build_layer

# In plain PyTorch, as nothing is to be compiled for modules whose shapes alone are read.
OPS = cast(Ops, reference)


def checkpoint_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, whole shape) of each tensor, under its Hugging Face name."""
    for tensor in checkpoint_tensors(_without_layers(config)):
        yield tensor.name, tensor.shape
    of_kind: dict[bool, list[tuple[str, tuple[int, ...]]]] = {}
    for i in range(config.num_layers):
        kind = config.is_moe_layer(i)
        if kind not in of_kind:
            of_kind[kind] = [(t.name, t.shape) for t in checkpoint_tensors(_layer(config, i), "")]
        for name, shape in of_kind[kind]:
            yield f"model.layers.{i}.{name}", shape


def num_weights(config: ModelConfig) -> int:
    """Counts the weights of all matrices. Norms and biases are left out."""
    layers_of_kind: dict[bool, list[int]] = defaultdict(list)
    for i in range(config.num_layers):
        layers_of_kind[config.is_moe_layer(i)].append(i)
    in_layers = sum(_count(_layer(config, same[0])) * len(same) for same in layers_of_kind.values())
    return _count(_without_layers(config)) + in_layers


def _without_layers(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(replace(config, num_layers=0), TensorParallel.single(), OPS, {}, 0)


def _layer(config: ModelConfig, layer: int) -> nn.Module:
    shape = attention_shape(config, 1)
    with torch.device("meta"):
        return build_layer(config, layer, TensorParallel.single(), OPS, {shape: TorchBackend(shape)})


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
