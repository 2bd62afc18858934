"""Streams a checkpoint into a model, tensor by tensor. Each layer shards and converts what it gets; nothing here holds more than one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from tqdm import tqdm

from shoal.errors import CheckpointError
from shoal.models.config import ModelConfig
from shoal.weights.gguf import gguf_tensors
from shoal.weights.quantized import QuantizedTensor
from shoal.weights.safetensors import safetensors_tensors
from shoal.weights.source import CheckpointFiles


class Loadable(Protocol):
    """What a model offers to be filled."""

    def begin_loading(self) -> None: ...
    def load_weight(self, name: str, tensor: torch.Tensor | QuantizedTensor) -> None: ...
    def finish_loading(self) -> None: ...
    def load_dummy_weights(self, seed: int = 0) -> None: ...


def load_weights(model: Loadable, files: CheckpointFiles, *, dummy: bool = False, show_progress: bool = True) -> None:
    """Raises CheckpointError naming the checkpoint and the tensor."""
    if dummy:
        model.load_dummy_weights()
        return
    bar = tqdm(_tensors(files), desc="Loading weights", unit=" tensors", leave=False, disable=None if show_progress else True)
    try:
        model.begin_loading()
        for name, tensor in bar:
            if not is_derived(name, files.config):
                model.load_weight(name, tensor)
        model.finish_loading()
    except (CheckpointError, OSError) as error:
        if isinstance(error, CheckpointError) and str(files.path) in str(error):
            raise
        raise CheckpointError(f"{files.path}: {error}") from None


def _tensors(files: CheckpointFiles) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    return safetensors_tensors(files.folder) if files.file is None else gguf_tensors(files.header, files.config)


def is_derived(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints hold although they follow from others."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
