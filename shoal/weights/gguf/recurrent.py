"""Tensors of recurrent layers in GGUF files, put back as checkpoints hold them. llama.cpp's converter stores
-exp(A_log), drops dimensions of one number or adds them, and moves Qwen3.5's value heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.kernels.quant.gguf_tensor import MOVED, GGUFTensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor, RowwiseTensor
from shoal.kinds.recurrent import DeltaKind
from shoal.model_config import ModelConfig

CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight", *(f".{part}_conv1d.weight" for part in "qkv"))
Shape = tuple[int, ...]
Matrix = Any  # a torch.Tensor or a QuantizedTensor


class Restored(NamedTuple):
    """A tensor as a checkpoint has it. `restore` takes the file's."""

    shape: Shape
    restore: Callable[[Matrix], Matrix]


def restored(name: str, shape: Shape) -> Restored | None:
    """None: the file has the tensor as a checkpoint does."""
    size = int(np.prod(shape))
    if name.endswith(".self_attn.A_log"):  # Kimi Linear's
        heads = (1, 1, size, 1)
        return Restored(heads, lambda stored: stored.float().neg().log().reshape(heads))
    if name.endswith(".A_log"):
        return Restored((size,), lambda stored: stored.float().neg().log().flatten())
    if name.endswith((".mamba.D", ".mamba.norm.weight")):
        return Restored((size,), lambda stored: stored.flatten())
    if name.endswith(CONVOLUTIONS):
        channels = size // shape[-1]
        return Restored((channels, 1, shape[-1]), lambda stored: stored.reshape(channels, 1, shape[-1]))
    if name.endswith(".shared_expert_gate.weight"):
        return Restored((1, size), lambda stored: stored.reshape(1, size))
    return None


# a delta net's tensors whose rows belong to value heads, and how many for a head
ROWS = re.compile(r".*\.linear_attn\.(?:(in_proj_[vz])|in_proj_[ab]|(A_log|dt_bias)|(conv1d))(?:\.weight)?")


def by_key_heads(name: str, config: ModelConfig) -> Callable[[Matrix], Matrix] | None:
    """Returns a function that moves a delta net's value heads, which the file has one of each key head after
    another, to where checkpoints have them: all of a key head together. None: the tensor has no value
    heads."""
    if ".linear_attn." not in name:
        return None
    kind = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaKind))
    heads = np.arange(kind.num_value_heads).reshape(-1, kind.num_key_heads).T.flatten()
    if name.endswith(".out_proj.weight"):
        return lambda matrix: take_columns(matrix, of_heads(heads, kind.value_dim))
    found = ROWS.fullmatch(name)
    if found is None:
        return None
    of_values, _, of_conv = found.groups()
    rows = of_heads(heads, kind.value_dim if of_values or of_conv else 1)
    if of_conv:
        first = sum(kind.part_sizes[:2])
        rows = np.concatenate((np.arange(first), first + rows))
    return lambda matrix: take_rows(matrix, rows)


def of_heads(heads: np.ndarray, size: int) -> np.ndarray:
    """The numbers of these heads, of `size` numbers each."""
    return (heads[:, None] * size + np.arange(size)).flatten()


def take_rows(matrix: Matrix, rows: np.ndarray) -> Matrix:
    """Packed rows move as a whole."""
    index = torch.from_numpy(rows)
    return matrix.take_rows(index) if isinstance(matrix, RowwiseTensor) else matrix[index]


def take_columns(matrix: Matrix, columns: np.ndarray) -> Matrix:
    """Columns of GGUF's types stay packed where they move in runs that have scales of their own; others are
    unpacked."""
    runs = columns.reshape(-1, MOVED) if len(columns) % MOVED == 0 else None
    if isinstance(matrix, GGUFTensor) and runs is not None:
        first = runs[:, 0]
        if (first % MOVED == 0).all() and (runs == first[:, None] + np.arange(MOVED)).all():
            return matrix.take_columns(first // MOVED)
    plain = matrix.dequantize() if isinstance(matrix, QuantizedTensor) else matrix
    return plain[:, torch.from_numpy(columns)]
