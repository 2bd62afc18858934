"""Loading: weights for a decoder, one checkpoint tensor at a time under its Hugging Face name. Each layer
takes its own shard (layers/loading.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor, RowwiseTensor
from shoal.layers.experts import ExpertMatrix
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer
from shoal.layers.matrix import MatrixLayer
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder
from shoal.models.layouts.layout import made_up
from shoal.models.layouts.registry import BY_NAME
from shoal.models.registry import BY_NAME as ARCHITECTURES

# A factor of random embeddings: with it each expert of the published shapes is chosen by some of 256 tokens.
SPREADING = 200.0

LAYER = re.compile(r"layers\.(\d{1,6})\.")


class Loading:
    """One load of weights into a decoder, which may have others already. `names`: the tensors that will come;
    None: all of a checkpoint."""

    def __init__(self, model: Decoder, names: Iterable[str] | None = None) -> None:
        every = {tensor.name: tensor for tensor in checkpoint_tensors(model, model.config)}
        self._model = model
        self._awaited = every if names is None else {name: every[name] for name in names}

    def take(self, name: str, tensor: Loaded) -> None:
        """Takes one whole checkpoint tensor. Raises CheckpointError for a wrong shape, or for an unknown name
        unless the tensor is empty."""
        if name not in self._awaited:
            if 0 in tensor.shape:
                return
            raise CheckpointError(
                f"the checkpoint holds {name}, which this {self._model.config.architecture} model does not "
                "have"
            )
        self._awaited.pop(name).load(tensor, name)

    def finish(self) -> None:
        """Packs what stays quantized. Raises CheckpointError if a tensor never came."""
        if self._awaited:
            missing = sorted(self._awaited)
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}; is a shard missing?"
            )
        finish(self._model)
        # A draft head may read hidden states between layers (heads/hidden_states.py).
        is_whole = [layer for _, layer in self._model.running] == [*self._model.layers]
        if is_whole and self._model.keep_quantized and self._model.norm.weight.device.type == "cpu":
            from shoal.models.fused import fuse_layers

            self._model.fused = fuse_layers(self._model.layers, self._model.config)


def finish(module: nn.Module) -> None:
    """Ends a load of all layers in `module`."""
    for layer in module.modules():
        if isinstance(layer, LoadingLayer):
            layer.finish()


@torch.no_grad()
def load_dummy_weights(model: Decoder) -> None:
    """Small random weights, for benchmarks: the arithmetic of a real model, made on the device.

    With experts, embeddings are large. Attention of random weights averages tokens, so with small embeddings
    they become alike from layer to layer, and routers send all of them to the same experts."""
    make_up(model, model.config, model.norm.weight.device, seed=0)
    if any(kind.experts is not None for kind in model.config.layers):
        model.embed_tokens.plain_weight().mul_(SPREADING)


@torch.no_grad()
def make_up(model: nn.Module, config: ModelConfig, device: torch.device, seed: int) -> None:
    """Gives the layers of a model or a head small random weights, as a checkpoint of `config` holds them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    stored = config.quantization
    quantized = None if stored is None else partial(made_up, BY_NAME[stored.layout], stored)
    experts_only = stored is not None and BY_NAME[stored.layout].experts_only
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            plain = experts_only and not isinstance(module, ExpertMatrix)
            module.load_dummy(path, generator, None if plain else quantized)
    fill_parameters(model, generator)


@torch.no_grad()
def fill_parameters(module: nn.Module, generator: torch.Generator) -> None:
    """Makes up the parameters of a module: norms and factors of layers are 1, and other numbers are small."""
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("layer_scalar.value"):
            parameter.fill_(1.0)
        elif parameter.is_floating_point():
            parameter.uniform_(-0.02, 0.02, generator=generator)


def checkpoint_tensors(
    module: nn.Module, config: ModelConfig, prefix: str = "model."
) -> Iterator[CheckpointTensor]:
    """Returns the checkpoint's tensors for the layers in `module`, as its architecture stores them."""
    interleaved = ARCHITECTURES[config.architecture].interleaved
    for tensor in layer_tensors(module, prefix):
        rotates = interleaved and (".q_proj." in tensor.name or ".k_proj." in tensor.name)
        yield by_halves(tensor, config) if rotates else tensor


def layer_tensors(module: nn.Module, prefix: str = "model.") -> Iterator[CheckpointTensor]:
    """Returns the tensors for the layers in `module`. A name is the module's path here, after `prefix`; the
    output head's has no prefix."""
    for path, layer in module.named_modules():
        if isinstance(layer, LoadingLayer):
            path = path.removeprefix("layer_embeddings.")  # they are outside of the layers in checkpoints
            yield from layer.checkpoint_tensors(path if path == "lm_head" else f"{prefix}{path}")


def by_halves(tensor: CheckpointTensor, config: ModelConfig) -> CheckpointTensor:
    """A tensor of q or k of a layer whose rotated pairs are neighbours in the checkpoint. Its rows are moved
    such that the pairs lie half of the rotated numbers apart. Only GGUF's packed rows can be moved; others
    are unpacked."""

    def load(stored: Loaded, name: str) -> None:
        layer = LAYER.search(tensor.name)
        assert layer is not None, f"{tensor.name} belongs to no layer"
        attention = config.layers[int(layer[1])].attention
        assert attention is not None, f"{tensor.name} belongs to a layer without attention"
        rotated = torch.arange(attention.rotary_dim, device="cpu").view(-1, 2).T.flatten()
        rest = torch.arange(attention.rotary_dim, attention.head_dim, device="cpu")
        in_head = torch.cat((rotated, rest))
        heads = torch.arange(stored.shape[0] // attention.head_dim, device="cpu") * attention.head_dim
        order = (heads[:, None] + in_head).flatten()
        if isinstance(stored, RowwiseTensor):
            tensor.load(stored.take_rows(order), name)
        else:
            plain = stored.dequantize() if isinstance(stored, QuantizedTensor) else stored
            tensor.load(plain[order.to(plain.device)], name)

    return tensor._replace(load=load)
