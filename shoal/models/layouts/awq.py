"""AWQ (Lin et al. 2023) as AutoAWQ's "gemm" version stores it: 4 bits, eight outputs in an int32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.layout import (
    HALVES,
    Layout,
    Stored,
    choice,
    group_size,
    num_groups_or_parts,
    of_whole_groups,
    unpack,
)

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.int4_tensor import Int4Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order of the outputs in an int32, from its low bits on


def read(fields: ConfigFields) -> Quantization:
    choice(fields, "bits", (4,))
    for key in ("version", "format"):  # Tools write it under either name, or under both.
        choice(fields, key, (None, "gemm", "GEMM"))
    choice(fields, "zero_point", (None, True))
    return Quantization("awq", 4, (1, group_size(fields)), zero_points=True)


def matrix_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    inputs, words = shapes["qweight"]
    return 8 * words, inputs


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups_or_parts(inputs, quantization.block[1])
    return {
        "qweight": Stored((inputs, outs // 8), ("I32",)),
        "qzeros": Stored((groups, outs // 8), ("I32",)),
        "scales": Stored((groups, outs), HALVES),
    }


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Int4Tensor:
    from shoal.kernels.quant.int4_tensor import Int4Tensor

    quants, size = unpack(stored["qweight"], 1, ORDER).T, quantization.block[1]
    of_groups = stored["scales"].T, unpack(stored["qzeros"], 1, ORDER).T
    return Int4Tensor.of(quants, *(of_whole_groups(numbers, quants.shape[1], size) for numbers in of_groups))


LAYOUT = Layout("awq", "awq", "qweight", read, matrix_shape, tensors, join)
