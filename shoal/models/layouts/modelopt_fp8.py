"""fp8 as NVIDIA's ModelOpt stores it, with one scale for a matrix and one for its input, which is not used:
activations are scaled token by token. ModelOpt may store other matrices of the same model in NVFP4."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import fp8_shape, fp8_zeros, join_fp8
from shoal.models.layouts.layout import INPUT_SCALES, ONE, Layout, Stored, choice

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MXFP8")


def modelopt_algorithms(fields: ConfigFields) -> set[str]:
    """The algorithms by which matrices are stored. Raises CheckpointError for others than ALGORITHMS."""
    algorithm = choice(fields, "quant_algo", (*ALGORITHMS, "MIXED_PRECISION"))
    if algorithm != "MIXED_PRECISION":
        return {str(algorithm)}
    layers = fields.get("quantized_layers")
    if (
        not isinstance(layers, dict)
        or not layers
        or not all(isinstance(own, dict) for own in layers.values())
    ):
        raise CheckpointError(
            f"{fields.where}: quantized_layers must have an algorithm for each matrix, got {layers!r:.80}"
        )
    return {
        str(choice(ConfigFields(own, f"{fields.where}: {name!s:.80}"), "quant_algo", ALGORITHMS))
        for name, own in layers.items()
    }


def read(fields: ConfigFields) -> Quantization | None:
    return Quantization("modelopt-fp8", 8, (0, 0)) if "FP8" in modelopt_algorithms(fields) else None


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    return {"weight": Stored((outs, inputs), ("F8_E4M3",)), "weight_scale": ONE}


LAYOUT = Layout(
    "modelopt-fp8",
    "modelopt",
    "weight_scale",
    read,
    fp8_shape,
    tensors,
    join_fp8,
    fp8_zeros,
    is_fp8=True,
    unread=INPUT_SCALES,
)
