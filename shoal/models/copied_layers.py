"""`CopiedLayers`: captures a step of a decoder by a few of its layers, of which the others are copies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from shoal.kernels.layer_cache import LayerCache, LayerMemory
from shoal.kernels.layer_copies import LayerCopies, Span
from shoal.layers.weight_format import WeightFormat
from shoal.models.decoder import AfterLayer, Decoder

logger = logging.getLogger(__name__)

CAPTURED = 3  # layers that are captured before the others are copied; the last layer is captured, too
FEWEST = 6  # layers of a decoder for which it is worth it
T = TypeVar("T")


class CopiedLayers:
    """Captures steps of `model`. Where a layer cannot be copied, all layers are captured, which takes longer
    and gives the same graph: layers of several kinds, layers whose states a draft head reads, and kernels
    that differ by more than addresses."""

    def __init__(self, model: Decoder, caches: Sequence[LayerMemory]) -> None:
        self._model, self._running = model, model.running
        kinds = model.config.layers
        self._copies: LayerCopies | None = None  # made by the first capture
        self._caches = caches
        is_alike = len(kinds) >= FEWEST and all(kind == kinds[0] for kind in kinds)
        is_on_gpu = isinstance(caches[0], LayerCache) and caches[0].blocks.is_cuda
        is_plain = all(layer is model.layers[i] for i, layer in self._running)
        self._copies_layers = is_alike and is_on_gpu and is_plain

    def capture(self, launch: Callable[[AfterLayer | None], T]) -> T:
        """`launch` launches a step, and gives its argument to the model as `after_layer`. Outside of a
        capture all layers run."""
        if not self._copies_layers or not torch.cuda.is_current_stream_capturing():
            return launch(None)
        if self._copies is None:
            self._copies = LayerCopies()
            self._spans = [*map(_spans, self._model.layers, self._caches)]
        copies = self._copies
        if copies.missing:
            return launch(None)
        copies.begin()
        self._model.running = [*self._running[:CAPTURED], self._running[-1]]
        try:
            return launch(self._after_layer)
        finally:
            self._model.running = self._running

    def _after_layer(self, i: int) -> None:
        if i >= CAPTURED:
            return
        assert self._copies is not None
        stream = torch.cuda.current_stream().cuda_stream
        self._copies.mark(stream)
        if i == CAPTURED - 1:
            spans = self._spans
            if not self._copies.add(stream, spans[i - 1], spans[i], spans[CAPTURED:-1]):
                logger.info("each layer is captured by itself: %s", self._copies.refused)
                # The model is running through this list: the next layers follow.
                self._model.running[CAPTURED:CAPTURED] = self._running[CAPTURED:-1]


def _spans(layer: nn.Module, cache: LayerMemory) -> list[Span]:
    """Returns the memory that belongs to the layer alone. Its part of a cache is strided, so the first
    block's part stands for all of it."""
    tensors = [value for module in layer.modules() for value in _tensors(module)]
    spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    if isinstance(cache, LayerCache):
        spans.append((cache.blocks.data_ptr(), cache.blocks[0].nbytes))
        if cache.scales_2G is not None:
            spans.append((cache.scales_2G.data_ptr(), cache.scales_2G.nbytes))
    return spans


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    if isinstance(weights := getattr(module, "format", None), WeightFormat):
        own += weights.tensors().values()
    return [value for value in own if isinstance(value, torch.Tensor) and value.is_cuda]
