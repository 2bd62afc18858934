"""MXFP4 as gpt-oss publishes its experts: e2m1 with two inputs in a byte, in blocks of 32 inputs, and a power
of two for each block. All experts of a layer are in one tensor (Architecture.tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.layout import Layout, Stored, num_groups

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

BLOCK = 32  # inputs


def read(fields: ConfigFields) -> Quantization:
    return Quantization("mxfp4", 4, (1, BLOCK))


def matrix_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, blocks, _ = shapes["blocks"]
    return outs, BLOCK * blocks


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    blocks = num_groups(inputs, BLOCK)
    return {"blocks": Stored((outs, blocks, BLOCK // 2), ("U8",)), "scales": Stored((outs, blocks), ("U8",))}


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Mxfp4Tensor:
    from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

    return Mxfp4Tensor.of(stored["blocks"].flatten(1), stored["scales"])


LAYOUT = Layout("mxfp4", "mxfp4", "blocks", read, matrix_shape, tensors, join, experts_only=True)
