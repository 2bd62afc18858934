"""The tensors that a checkpoint of a config holds, and how many weights they are, before anything is made for
them.

Both come from the modules themselves, which are built without memory (on torch's meta device). Nothing is
computed there, as the first computation on that device imports hundreds of modules. A config with wrong
numbers costs little: one layer is built of each kind, and shapes come one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shoal.attention.cpu import TorchBackend
from shoal.attention.latent_cpu import TorchLatentBackend
from shoal.kernels import reference
from shoal.kernels.ops import Ops
from shoal.kinds.latent import LatentKind
from shoal.layers.mixer import mixer_shape
from shoal.layers.parallel import TensorParallel
from shoal.layers.per_layer import PerLayerEmbeddings
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.decoder import Decoder, build_layer
from shoal.models.heads.mtp import MtpHead
from shoal.models.loading import checkpoint_tensors

# In plain PyTorch, as nothing is to be compiled for modules whose shapes alone are read.
OPS = cast(Ops, reference)


def checkpoint_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, whole shape) of each tensor, under its Hugging Face name."""
    for tensor in checkpoint_tensors(_without_layers(config), config):
        yield tensor.name, tensor.shape
    of_kind: dict[LayerKind, list[tuple[str, tuple[int, ...]]]] = {}
    for i, kind in enumerate(config.layers):
        if kind not in of_kind:
            of_kind[kind] = [(t.name, t.shape) for t in checkpoint_tensors(_layer(config, kind), config, "")]
        for name, shape in of_kind[kind]:
            yield f"model.layers.{i}.{name}", shape


def mtp_shapes(config: ModelConfig, own: Collection[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, whole shape) of each tensor of an MTP head with the layers of `config`, under the module's name.
    `own`: as MtpHead takes it."""
    with torch.device("meta"):
        target, backends = _without_layers(config), _backends(config.layers)
        head = MtpHead(config, target, TensorParallel.single(), OPS, backends, own)
    for tensor in checkpoint_tensors(head, config):
        yield tensor.name, tensor.shape


def num_weights(config: ModelConfig) -> int:
    """Counts the weights of all matrices, a draft head's layers included. Norms and biases are left out."""
    kinds = Counter(config.cached_layers)
    in_layers = sum(_count(_layer(config, kind)) * count for kind, count in kinds.items())
    return _count(_without_layers(config)) + in_layers


def _without_layers(config: ModelConfig) -> Decoder:
    tp = TensorParallel.single()
    with torch.device("meta"):
        decoder = Decoder(replace(config, layers=()), tp, OPS, {})
        if config.per_layer_size:  # their table is as wide as there are layers
            decoder.layer_embeddings = PerLayerEmbeddings(config, tp, OPS)
        return decoder


def _layer(config: ModelConfig, kind: LayerKind) -> nn.Module:
    with torch.device("meta"):
        return build_layer(config, kind, TensorParallel.single(), OPS, _backends([kind]))


def _backends(kinds: Iterable[LayerKind]) -> dict[Hashable, Any]:
    shapes = [mixer_shape(kind.attention, 1) for kind in kinds if kind.attention is not None]
    return {
        shape: TorchLatentBackend(shape) if isinstance(shape, LatentKind) else TorchBackend(shape)
        for shape in shapes
    }


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
