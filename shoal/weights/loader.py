"""Streams a checkpoint into a model, tensor by tensor. Each layer shards and converts its tensors; at most
one tensor is held at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import torch
from tqdm import tqdm

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder
from shoal.models.layouts.registry import BY_NAME
from shoal.models.loading import Loading, load_dummy_weights
from shoal.models.shapes import checkpoint_shapes
from shoal.weights.gguf.tensors import gguf_shapes, gguf_tensors
from shoal.weights.quantized import folder_tensors, tensor_headers
from shoal.weights.safetensors import KV_SCALE
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
KEY_OR_VALUE = re.compile(r"model\.layers\.([0-9]{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm)\.")


def load_weights(
    model: Decoder, files: CheckpointFiles, *, dummy: bool = False, show_progress: bool = True
) -> None:
    """Fills `model` with the checkpoint's tensors, or with random ones (`dummy`). Raises CheckpointError that
    names the checkpoint and the tensor."""
    if dummy:
        load_dummy_weights(model)
        return
    bar = tqdm(
        checkpoint_tensors(files),
        desc="Loading weights",
        unit=" tensors",
        leave=False,
        disable=None if show_progress else True,
    )
    try:
        loading = Loading(model)
        for name, tensor in bar:
            if _is_weight(name, files.config):
                loading.take(name, tensor)
        loading.finish()
    except (CheckpointError, OSError) as error:
        raise _named(error, files) from None


def load_hollow_weights(model: Decoder, files: CheckpointFiles, device: torch.device) -> None:
    """Allocates all weights of `model` on this device by the checkpoint's headers, filled with zeros; the
    numbers come from another worker. `lies_by_shape(files)` must be True. Raises CheckpointError."""
    assert lies_by_shape(files)
    quantization = files.config.quantization
    every = {} if quantization is None else {own.layout: own for own in quantization.every}
    zero = torch.zeros((), device=device)
    try:
        loading = Loading(model)
        for name, header in tensor_headers(files.folder, files.config).items():
            if not _is_weight(name, files.config):
                continue
            if header.dtype in every:
                outs, inputs = header.shape
                zeros = BY_NAME[header.dtype].zeros
                assert zeros is not None
                loading.take(name, zeros(outs, inputs, every[header.dtype], device))
            else:
                loading.take(name, zero.expand(header.shape))  # It takes no memory.
        loading.finish()
    except (CheckpointError, OSError) as error:
        raise _named(error, files) from None


def lies_by_shape(files: CheckpointFiles) -> bool:
    """Says if shapes alone decide the layout of the checkpoint's weights in an engine's memory. In a GGUF
    file and in most 4-bit layouts the numbers matter, too."""
    quantization = files.config.quantization
    if files.file is not None or quantization is None:
        return files.file is None
    layouts = [own.layout for own in quantization.every]
    # A header names a layout, which does not say in which groups a matrix is if the config has two of them.
    return len(set(layouts)) == len(layouts) and all(BY_NAME[name].zeros is not None for name in layouts)


def check_shapes(files: CheckpointFiles) -> None:
    """Checks the files' headers, a draft head's too, before anything is made for them. Raises CheckpointError
    unless they hold the tensors that the config asks for, and no others. If a config claims more tensors than
    there are, this ends at the first one that is missing."""
    try:
        if files.head is not None:
            files.head.check()
        if files.file is None:
            headers = tensor_headers(files.folder, files.config)
            shapes = {name: header.shape for name, header in headers.items()}
        else:
            if files.header.left_out:
                logger.info(
                    "%s: %d tensors of images, sounds or draft heads are left out; the text model is loaded",
                    files.path,
                    files.header.left_out,
                )
            shapes = gguf_shapes(files.header, files.config)
        found = {name: shape for name, shape in shapes.items() if _is_weight(name, files.config)}
        for name, shape in checkpoint_shapes(files.config):
            if name not in found:
                raise CheckpointError(
                    f"the checkpoint lacks the tensor {name}, which its config needs; is a shard missing?"
                )
            if found[name] != shape:
                raise CheckpointError(
                    f"{name} has shape {list(found[name])}, but the config asks for "
                    f"{list(shape)}; is it another model's file?"
                )
            del found[name]
        if unknown := [name for name, shape in found.items() if 0 not in shape]:
            raise CheckpointError(
                f"the checkpoint holds {min(unknown)}, which this "
                f"{files.config.architecture} model does not have"
            )
    except (CheckpointError, OSError) as error:
        raise _named(error, files) from None


def _named(error: Exception, files: CheckpointFiles) -> CheckpointError:
    if isinstance(error, CheckpointError) and str(files.path) in str(error):
        return error
    return CheckpointError(f"{files.path}: {error}")


def checkpoint_tensors(files: CheckpointFiles) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Yields every tensor with its Hugging Face name. Raises CheckpointError."""
    if files.file is None:
        return folder_tensors(files.folder, files.config)
    return gguf_tensors(files.header, files.config)


def _is_weight(name: str, config: ModelConfig) -> bool:
    """Says if a layer loads this tensor."""
    return not is_derived(name, config) and KV_SCALE.fullmatch(name) is None and not is_draft(name, config)


def is_derived(name: str, config: ModelConfig) -> bool:
    """Says if a tensor follows from others. Old checkpoints hold such tensors too."""
    if name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
        return True
    return is_unread(name, config)


def is_unread(name: str, config: ModelConfig) -> bool:
    """Says if a tensor makes keys or values in a layer that reads another layer's."""
    part = KEY_OR_VALUE.match(name)
    if part is None or int(part[1]) >= config.num_layers:
        return False
    attention = config.layers[int(part[1])].attention
    return attention is not None and attention.kv_layer is not None


def is_draft(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor belongs to a layer after the last one, which drafts tokens."""
    layer = LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_draft_layers
