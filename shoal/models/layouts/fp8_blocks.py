"""fp8 as Qwen and DeepSeek publish it, with a scale for each block of 128 x 128 weights, and with one scale
for the matrix, under Mistral's names or under AutoFP8's. Scales of inputs are not used: activations are
scaled token by token, which is closer to the unpacked weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import FP8, block_sizes, fp8_shape, fp8_tensors, fp8_zeros
from shoal.models.layouts.layout import INPUT_SCALES, Layout, Stored, choice

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.fp8_tensor import Fp8Tensor


def read(fields: ConfigFields) -> Quantization:
    choice(fields, "fmt", (None, "e4m3", "float8_e4m3fn"))  # the latter is MiniMax's
    choice(fields, "scale_fmt", (None, "float", "ue8m0"))
    if fields.get("weight_block_size") is None and fields.get("activation_scheme") is not None:
        choice(fields, "activation_scheme", ("dynamic", "static"))
        return Quantization("fp8-blocks", 8, (0, 0), others=(Quantization(FP8, 8, (0, 0)),))
    choice(fields, "activation_scheme", (None, "dynamic"))
    return Quantization("fp8-blocks", 8, block_sizes(fields, "weight_block_size"))


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    stored = fp8_tensors(outs, inputs, quantization)
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Fp8Tensor:
    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    return Fp8Tensor.of(stored["weight"], stored["weight_scale_inv"], quantization.block)


LAYOUT = Layout(
    "fp8-blocks",
    "fp8",
    "weight_scale_inv",
    read,
    fp8_shape,
    tensors,
    join,
    fp8_zeros,
    is_fp8=True,
    unread=INPUT_SCALES,
)
