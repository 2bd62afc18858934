"""NVFP4 as compressed-tensors and NVIDIA's ModelOpt store it: e2m1 with two inputs in a byte, an fp8 scale
for each 16, and one for the matrix. Scales of activations are not used: activations keep 16 bits or more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import METHOD, NVFP4, packed_shape, read_weights
from shoal.models.layouts.layout import INPUT_SCALES, ONE, Layout, Stored, choice, joined, num_groups
from shoal.models.layouts.modelopt_fp8 import modelopt_algorithms

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor

GROUP = 16


def read_packed(fields: ConfigFields) -> Quantization | None:
    return joined(map(_packed, read_weights(fields, NVFP4)))


def _packed(weights: ConfigFields) -> Quantization:
    choice(weights, "num_bits", (4,))
    choice(weights, "type", ("float",))
    choice(weights, "strategy", ("tensor_group", "group"))
    choice(weights, "group_size", (GROUP,))
    choice(weights, "symmetric", (None, True))
    return Quantization(NVFP4, 4, (1, GROUP))


def read_modelopt(fields: ConfigFields) -> Quantization | None:
    is_there = bool(modelopt_algorithms(fields) & {"NVFP4", "W4A16_NVFP4"})
    return Quantization("modelopt-nvfp4", 4, (1, GROUP)) if is_there else None


def modelopt_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, pairs = shapes["weight"]
    return outs, 2 * pairs


def packed_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    return {
        "weight_packed": Stored((outs, inputs // 2), ("U8",)),
        "weight_scale": Stored((outs, num_groups(inputs, GROUP)), ("F8_E4M3",)),
        "weight_global_scale": ONE,
    }


def modelopt_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    return {
        "weight": Stored((outs, inputs // 2), ("U8",)),
        "weight_scale": Stored((outs, num_groups(inputs, GROUP)), ("F8_E4M3",)),
        "weight_scale_2": ONE,
    }


def join_packed(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Nvfp4Tensor:
    from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor

    scales = stored["weight_scale"].float() / stored["weight_global_scale"].float()
    return Nvfp4Tensor.of(stored["weight_packed"], scales)


def join_modelopt(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Nvfp4Tensor:
    from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor

    scales = stored["weight_scale"].float() * stored["weight_scale_2"].float()
    return Nvfp4Tensor.of(stored["weight"], scales)


PACKED_LAYOUT = Layout(
    NVFP4,
    METHOD,
    "weight_packed",
    read_packed,
    packed_shape,
    packed_tensors,
    join_packed,
    unread=INPUT_SCALES,
)
MODELOPT_LAYOUT = Layout(
    "modelopt-nvfp4",
    "modelopt",
    "weight_scale_2",
    read_modelopt,
    modelopt_shape,
    modelopt_tensors,
    join_modelopt,
    unread=INPUT_SCALES,
)
