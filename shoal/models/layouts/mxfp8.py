"""MXFP8 as compressed-tensors and ModelOpt store it: fp8 with a power of two (e8m0) for each 32 inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import METHOD, MXFP8, fp8_shape, fp8_zeros, read_weights
from shoal.models.layouts.layout import INPUT_SCALES, Layout, Stored, choice, joined, num_groups
from shoal.models.layouts.modelopt_fp8 import modelopt_algorithms

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

GROUP = 32  # inputs
BIAS = 127  # e8m0: a scale's exponent is its byte less this.


def read(fields: ConfigFields) -> Quantization | None:
    return joined(map(_mxfp8, read_weights(fields, MXFP8)))


def _mxfp8(weights: ConfigFields) -> Quantization:
    choice(weights, "num_bits", (8,))
    choice(weights, "type", ("float",))
    choice(weights, "strategy", ("group",))
    choice(weights, "group_size", (GROUP,))
    return Quantization(MXFP8, 8, (1, GROUP))


def read_modelopt(fields: ConfigFields) -> Quantization | None:
    return Quantization("modelopt-mxfp8", 8, (1, GROUP)) if "MXFP8" in modelopt_algorithms(fields) else None


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    scales = Stored((outs, num_groups(inputs, GROUP)), ("U8",))
    return {"weight": Stored((outs, inputs), ("F8_E4M3",)), "weight_scale": scales}


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Fp8Tensor:
    import torch

    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    scales = torch.exp2(stored["weight_scale"].float() - BIAS)
    return Fp8Tensor.of(stored["weight"], scales, quantization.block)


LAYOUT = Layout(
    MXFP8, METHOD, "weight_scale", read, fp8_shape, tensors, join, fp8_zeros, is_fp8=True, unread=INPUT_SCALES
)
MODELOPT_LAYOUT = Layout(
    "modelopt-mxfp8",
    "modelopt",
    "weight_scale",
    read_modelopt,
    fp8_shape,
    tensors,
    join,
    fp8_zeros,
    is_fp8=True,
    unread=INPUT_SCALES,
)
