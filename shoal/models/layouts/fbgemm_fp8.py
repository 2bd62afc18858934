"""fp8 as FBGEMM stores it, with a scale for each output, as Llama 3.1 405B is published. Its upper bound of
activations (input_scale_ub) is not used: activations are scaled token by token, by their largest number."""

from __future__ import annotations

from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import fp8_shape, fp8_tensors, fp8_zeros, join_fp8
from shoal.models.layouts.layout import Layout


def read(fields: ConfigFields) -> Quantization:
    return Quantization("fbgemm-fp8", 8, (1, 0))


LAYOUT = Layout(
    "fbgemm-fp8",
    "fbgemm_fp8",
    "weight_scale",
    read,
    fp8_shape,
    fp8_tensors,
    join_fp8,
    fp8_zeros,
    is_fp8=True,
    unread=("input_scale_ub",),
)
