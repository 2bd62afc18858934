"""fp8 as Qwen and DeepSeek publish it: a scale for each block of 128 x 128 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.config_fields import ConfigFields
from shoal.models.layouts.compressed_tensors import block_sizes, fp8_shape, fp8_zeros
from shoal.models.layouts.layout import HALVES, Layout, Stored, choice

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.fp8_tensor import Fp8Tensor


def read(fields: ConfigFields) -> Quantization:
    choice(fields, "fmt", (None, "e4m3"))
    choice(fields, "activation_scheme", (None, "dynamic"))
    choice(fields, "scale_fmt", (None, "float"))
    return Quantization("fp8-blocks", 8, block_sizes(fields, "weight_block_size"))


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    tall, wide = quantization.block
    return {
        "weight": Stored((outs, inputs), ("F8_E4M3",)),
        "weight_scale_inv": Stored((-(-outs // tall), -(-inputs // wide)), HALVES),
    }


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Fp8Tensor:
    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    return Fp8Tensor.of(stored["weight"], stored["weight_scale_inv"], quantization.block)


LAYOUT = Layout("fp8-blocks", "fp8", "weight_scale_inv", read, fp8_shape, tensors, join, fp8_zeros)
