"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: 4 bits, eight inputs in an int32. With
act-order (`desc_act`), a tensor says which group each input belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.model_config import Quantization
from shoal.models.config_fields import ConfigFields
from shoal.models.layouts.layout import HALVES, Layout, Stored, choice, group_size, num_groups, unpack

if TYPE_CHECKING:
    import torch

    from shoal.kernels.int4_tensor import Int4Tensor


def read(fields: ConfigFields) -> Quantization:
    choice(fields, "bits", (4,))
    choice(fields, "pack_dtype", (None, "int32"))
    # The first version stores zero points less one.
    version = choice(fields, "checkpoint_format", (None, "gptq", "gptq_v2"))
    return Quantization(
        "gptq",
        4,
        (1, group_size(fields)),
        zero_points=True,
        act_order=fields.flag("desc_act"),
        zeros_minus_one=version != "gptq_v2",
    )


def matrix_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    words, outs = shapes["qweight"]
    return outs, 8 * words


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups(inputs, quantization.block[1])
    return {
        "qweight": Stored((inputs // 8, outs), ("I32",)),
        "qzeros": Stored((groups, outs // 8), ("I32",)),
        "scales": Stored((groups, outs), HALVES),
        "g_idx": Stored((inputs,), ("I32",)),
    }


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Int4Tensor:
    from shoal.kernels.int4_tensor import Int4Tensor

    zeros = unpack(stored["qzeros"], 1).T + int(quantization.zeros_minus_one)
    order = stored["g_idx"] if quantization.act_order else None
    return Int4Tensor.of(unpack(stored["qweight"], 0).T, stored["scales"].T, zeros, order)


LAYOUT = Layout("gptq", "gptq", "qweight", read, matrix_shape, tensors, join)
