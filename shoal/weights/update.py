"""Updates of a running model's weights: checks that a checkpoint fits, lists the model's tensors, and
computes their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import torch
import xxhash
from torch import nn

from shoal.errors import CheckpointError
from shoal.layers.matrix import MatrixLayer
from shoal.model_config import ModelConfig
from shoal.weights.fingerprint import FREE_FIELDS, weight_files
from shoal.weights.quantized import tensor_headers
from shoal.weights.source import CheckpointFiles


def difference(ours: ModelConfig, theirs: ModelConfig) -> str | None:
    """Returns the first field that makes `theirs` another model. None: weights of one fit the other. A draft
    head stays with the engine, whichever weights come."""
    for field in fields(ModelConfig):
        mine, its = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in (*FREE_FIELDS, "head_layers") and mine != its:
            return f"its {field.name} is {its!s:.80}, the engine's {mine!s:.80}"
    return None


def packing_difference(ours: CheckpointFiles, files: CheckpointFiles) -> str | None:
    """Returns the first tensor of `files` that is packed in another way than in `ours`, for an engine whose
    weights stay quantized. None: all are packed in the same way."""
    if (files.file is None) != (ours.file is None):
        return f"it is packed in another way than {ours.path}, the engine's checkpoint"
    kinds = _kinds(ours)
    for name, kind in _kinds(files).items():
        if kinds.get(name, kind) != kind:
            return f"its tensor {name} is {kind}, and the engine's is packed from {kinds[name]}"
    return None


def _kinds(files: CheckpointFiles) -> dict[str, str]:
    """Returns the type of each tensor in the files, by name. A matrix of several tensors has one."""
    if files.file is not None:
        return {name: info.kind for name, info in files.header.tensors.items()}
    headers = tensor_headers(files.folder, files.config)
    return {name: header.dtype for name, header in headers.items()}


def check_tensor(
    name: str, expected: tuple[int, ...] | None, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Raises CheckpointError if the model has no such tensor, if shapes differ, or if the tensor is not
    floating-point."""
    if expected is None:
        raise CheckpointError(
            f"{name} is a tensor that the engine's model does not have; drop it or build a new engine"
        )
    if tuple(shape) != expected:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, the engine's {list(expected)}; is it another model's?"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(
            f"{name} is {str(dtype).removeprefix('torch.')}; weights are floating-point numbers"
        )


def fingerprint(files: CheckpointFiles) -> list[tuple[str, int, int]]:
    """Returns (path, bytes, nanosecond of the last change) of each file that holds weights. Raises
    CheckpointError if a file is gone."""
    paths = weight_files(files)
    try:
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def weight_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors that hold weights: parameters, and the memory of packed matrices."""
    yield from model.named_parameters()
    for path, layer in model.named_modules():
        if isinstance(layer, MatrixLayer):
            for name, tensor in layer.format.tensors().items():
                yield f"{path}.{name}", tensor


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the checksum of each tensor's bytes in 16 hex digits, computed on the tensor's device. Equal
    weights have equal checksums on devices of one kind. A difference goes unnoticed with a chance of 2^-64,
    unless it was constructed to."""
    if next(iter(tensors.values())).device.type == "cpu":
        return {name: f"{xxhash.xxh3_64_intdigest(_bytes(tensor)):016x}" for name, tensor in tensors.items()}
    from shoal.kernels.copy.checksum import checksum

    sums = torch.zeros(len(tensors), dtype=torch.int64, device=next(iter(tensors.values())).device)
    for i, tensor in enumerate(tensors.values()):
        checksum(tensor, sums[i : i + 1])
    return {name: f"{value % 2**64:016x}" for name, value in zip(tensors, sums.tolist())}


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
