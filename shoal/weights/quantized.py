"""The tensors of a folder under the decoder's names (models/checkpoint_names.py). All tensors of a quantized
matrix come as one QuantizedTensor under the matrix's own name, `<module>.weight`. Only the tensors need
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.model_config import ModelConfig
from shoal.models.checkpoint_names import split
from shoal.models.layouts.layout import Stored
from shoal.models.layouts.registry import BY_NAME
from shoal.models.registry import BY_NAME as ARCHITECTURES
from shoal.weights.safetensors import (
    DTYPES,
    PACKED_DTYPES,
    Naming,
    TensorHeader,
    safetensors_headers,
    safetensors_tensors,
    text_name,
)

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.quantized_tensor import QuantizedTensor

EVERY_DTYPE = DTYPES | PACKED_DTYPES


def tensor_headers(folder: Path, config: ModelConfig, naming: Naming = text_name) -> dict[str, TensorHeader]:
    """Returns every tensor of the folder, from the files' headers alone. A quantized matrix counts as one,
    with its layout's name for a dtype. Raises CheckpointError for a matrix with missing tensors, or with
    other shapes or types than its layout."""
    quantization = config.quantization
    if quantization is None:
        return _headers(folder, DTYPES, config, naming)
    headers = _headers(folder, EVERY_DTYPE, config, naming)
    matrices = _matrices(headers, quantization)
    left_out = {name for _, parts in matrices.values() for name in parts.values()} | _unread(matrices)
    found = {name: header for name, header in headers.items() if name not in left_out}
    for name, header in found.items():
        if header.dtype in PACKED_DTYPES:
            raise CheckpointError(
                f"the tensor {name} has dtype {header.dtype}, but does not belong to a matrix in the "
                f"config's layout {quantization.layout}; its scales are missing, or the "
                "config is another checkpoint's"
            )
    for module, (own, parts) in matrices.items():
        layout = BY_NAME[own.layout]
        shape = layout.matrix_shape(_shapes_of(parts, headers))
        if f"{module}.weight" in found:
            raise CheckpointError(f"the checkpoint holds {module}.weight twice, plain and quantized")
        found[f"{module}.weight"] = TensorHeader(layout.name, shape)
    return found


def folder_tensors(
    folder: Path, config: ModelConfig, naming: Naming = text_name
) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Yields every matrix and every other tensor. A matrix comes when the last of its tensors has been read;
    until then its tensors are views of the mapped files."""
    quantization = config.quantization
    if quantization is None:
        yield from _tensors(folder, DTYPES, config, naming)
        return
    matrices = _matrices(_headers(folder, EVERY_DTYPE, config, naming), quantization)
    module_of = {
        name: (module, suffix) for module, (_, parts) in matrices.items() for suffix, name in parts.items()
    }
    held: dict[str, dict[str, torch.Tensor]] = {module: {} for module in matrices}
    unread = _unread(matrices)
    for name, tensor in _tensors(folder, EVERY_DTYPE, config, naming):
        if name in unread:
            continue
        if name not in module_of:
            yield name, tensor
            continue
        module, suffix = module_of[name]
        held[module][suffix] = tensor
        own, parts = matrices[module]
        if len(held[module]) == len(parts):
            try:
                matrix = BY_NAME[own.layout].join(held.pop(module), own)
            except CheckpointError as error:
                raise CheckpointError(f"{module}.weight: {error}") from None
            yield f"{module}.weight", matrix


def _headers(
    folder: Path, dtypes: Mapping[str, int], config: ModelConfig, naming: Naming
) -> dict[str, TensorHeader]:
    stored, found = ARCHITECTURES[config.architecture].tensors, {}
    headers = _whole_headers(folder, dtypes, naming)
    crossed = _crossed_blocks(headers, config)
    for name, header in headers.items():
        shape = crossed[name].shape(header.shape) if name in crossed else header.shape
        for part in split(name, shape, stored, config):
            found[part.name] = TensorHeader(header.dtype, part.shape)
    return found


def _tensors(
    folder: Path, dtypes: Mapping[str, int], config: ModelConfig, naming: Naming
) -> Iterator[tuple[str, torch.Tensor]]:
    stored, crossed = ARCHITECTURES[config.architecture].tensors, {}
    if config.quantization is not None:
        crossed = _crossed_blocks(_whole_headers(folder, dtypes, naming), config)
    for name, tensor in safetensors_tensors(folder, dtypes, naming):
        if (blocks := crossed.get(name)) is not None:
            tensor = tensor.repeat_interleave(blocks.height, blocks.dim).narrow(blocks.dim, 0, blocks.rows)
        for part in split(name, tuple(tensor.shape), stored, config):
            yield part.name, part.take(tensor)


def _whole_headers(folder: Path, dtypes: Mapping[str, int], naming: Naming) -> dict[str, TensorHeader]:
    """The files' own headers, of tensors that may hold several matrices."""
    files = safetensors_headers(folder, dtypes, naming)
    return {name: header for _, headers in files for name, header in headers.items()}


class _Blocks(NamedTuple):
    """Blocks of a tensor whose rows share scales."""

    dim: int  # the tensor's rows are along it
    rows: int  # the tensor's
    height: int  # rows of a block

    def shape(self, scales: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of these scales with one for each row."""
        return (*scales[: self.dim], self.rows, *scales[self.dim + 1 :])


def _crossed_blocks(headers: Mapping[str, TensorHeader], config: ModelConfig) -> dict[str, _Blocks]:
    """Returns the scales of blocks of rows of tensors that hold several matrices. A block may have rows of
    two matrices, so each row gets a scale of its own before the tensor is split."""
    stored, quantization = ARCHITECTURES[config.architecture].tensors, config.quantization
    found = {}
    for own in () if quantization is None else quantization.every:
        marker, height = BY_NAME[own.layout].marker, own.block[0]
        for name, header in headers.items() if height > 1 else ():
            matrix = _matrix_of(name, marker)
            weight = headers.get(matrix)
            if weight is None or len(weight.shape) not in (2, 3):
                continue
            parts = list(split(matrix, weight.shape, stored, config))
            dim = 0 if len(weight.shape) == 2 else 2 if parts[0].is_turned else 1
            rows = weight.shape[dim]
            if header.shape[dim : dim + 1] != (-(-rows // height),):
                continue
            if len(parts) > 1 and any(part.run % height for part in parts):
                found[name] = _Blocks(dim, rows, height)
    return found


def _matrix_of(name: str, marker: str) -> str:
    """Returns the matrix, or the experts in one tensor, whose scales have this name; "" for other tensors."""
    if name.endswith(f".{marker}"):
        return f"{name.removesuffix(marker)}weight"
    stack = marker.removeprefix("weight")
    return name.removesuffix(stack) if name.endswith(stack) else ""


def _shapes_of(parts: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    return {suffix: headers[name].shape for suffix, name in parts.items()}


def _unread(matrices: Mapping[str, tuple[Quantization, dict[str, str]]]) -> set[str]:
    """Names that tensors of these matrices may have and that are not read."""
    return {
        f"{module}.{suffix}" for module, (own, _) in matrices.items() for suffix in BY_NAME[own.layout].unread
    }


def _matrices(
    headers: Mapping[str, TensorHeader], quantization: Quantization
) -> dict[str, tuple[Quantization, dict[str, str]]]:
    """Each quantized matrix's layout, and its tensors by suffix, under its module's name."""
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = header
    found = {}
    for module, stored_as in modules.items():
        own = _quantization_of(stored_as, quantization)
        if own is None:
            continue
        layout, shapes = BY_NAME[own.layout], {suffix: header.shape for suffix, header in stored_as.items()}
        if own.block[0] > 1 and shapes[layout.marker][:1] == shapes.get("weight", ())[:1]:
            own = replace(own, block=(1, own.block[1]))  # scales of `_crossed_blocks`
        try:
            stored = layout.tensors(*layout.matrix_shape(shapes), own)
        except (KeyError, ValueError):
            raise CheckpointError(
                f"{module}: its tensors {sorted(shapes)} do not form a matrix in the layout {own.layout}"
            ) from None
        except CheckpointError as error:
            raise CheckpointError(f"{module}.weight: {error}") from None
        found[module] = own, {suffix: f"{module}.{suffix}" for suffix in stored}
        for suffix, expected in stored.items():
            _check(f"{module}.{suffix}", headers.get(f"{module}.{suffix}"), expected, own)
    if not found:
        markers = " or ".join(f".{BY_NAME[own.layout].marker}" for own in quantization.every)
        raise CheckpointError(
            f"the config says that matrices are quantized ({quantization.layout}), but there is no tensor "
            f"that ends in {markers}; is it another checkpoint's config?"
        )
    return found


def _quantization_of(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> Quantization | None:
    """Returns the layout that these tensors are in. None: the matrix is plain. Where a matrix has the markers
    of several layouts, shapes and types decide. A layout with zero points or act-order has all tensors of one
    without them, so the one with the most tensors is taken."""
    found = [own for own in quantization.every if BY_NAME[own.layout].marker in tensors]
    if len(found) < 2:
        return found[0] if found else None
    return max(found, key=lambda own: _num_fitting(tensors, own))


def _num_fitting(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> int:
    """Returns how many tensors a matrix has in this layout, or 0 if these are not such a matrix."""
    layout = BY_NAME[quantization.layout]
    try:
        shape = layout.matrix_shape({suffix: header.shape for suffix, header in tensors.items()})
        stored = layout.tensors(*shape, quantization)
    except (KeyError, ValueError, CheckpointError):
        return 0
    fits = all(
        suffix in tensors and tensors[suffix].shape == own.shape and tensors[suffix].dtype in own.dtypes
        for suffix, own in stored.items()
    )
    return len(stored) if fits else 0


def _check(name: str, header: TensorHeader | None, expected: Stored, quantization: Quantization) -> None:
    if header is None:
        raise CheckpointError(
            f"the checkpoint lacks {name}, which belongs to a matrix in the layout {quantization.layout}"
        )
    if header.shape != expected.shape or header.dtype not in expected.dtypes:
        raise CheckpointError(
            f"{name} has dtype {header.dtype} and shape {list(header.shape)}, but the layout "
            f"{quantization.layout} asks for {' or '.join(expected.dtypes)} and {list(expected.shape)}; does "
            "the config say another group_size or block?"
        )
