"""The layouts of quantized checkpoints that are read, and the reading of a quantization_config."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts import (
    auto_round,
    awq,
    compressed_tensors,
    fbgemm_fp8,
    fp8_blocks,
    gptq,
    int8,
    modelopt_fp8,
    mxfp4,
    mxfp8,
    nvfp4,
)
from shoal.models.layouts.layout import Layout, joined

LAYOUTS = (
    awq.LAYOUT,
    gptq.LAYOUT,
    int8.GPTQ_LAYOUT,
    auto_round.GPTQ_LAYOUT,
    auto_round.GPTQ8_LAYOUT,
    auto_round.AWQ_LAYOUT,
    compressed_tensors.INT4_LAYOUT,
    int8.PACKED_LAYOUT,
    int8.PLAIN_LAYOUT,
    compressed_tensors.FP8_LAYOUT,
    compressed_tensors.MXFP4_LAYOUT,
    mxfp8.LAYOUT,
    nvfp4.PACKED_LAYOUT,
    fp8_blocks.LAYOUT,
    fbgemm_fp8.LAYOUT,
    mxfp4.LAYOUT,
    nvfp4.MODELOPT_LAYOUT,
    modelopt_fp8.LAYOUT,
    mxfp8.MODELOPT_LAYOUT,
)
BY_NAME: dict[str, Layout] = {layout.name: layout for layout in LAYOUTS}


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """Returns the part of config.json under quantization_config, or in older checkpoints under
    compression_config; None for nothing. Raises CheckpointError for unknown, contradictory or unsupported
    values."""
    given = {key: fields.get(key) for key in ("quantization_config", "compression_config")}
    given = {key: value for key, value in given.items() if value}
    if not given:
        return None
    if len(given) > 1:
        raise CheckpointError(
            f"{fields.where}: quantization_config and compression_config are both given; remove one"
        )
    ((key, values),) = given.items()
    if not isinstance(values, dict):
        raise CheckpointError(f"{fields.where}: {key} {values!r:.80} is not an object")
    method = values.get("quant_method")
    own = ConfigFields(values, f"{fields.where}: {key}")
    read = [layout.read(own) for layout in LAYOUTS if layout.quant_method == method]
    if (found := joined(one for one in read if one is not None)) is not None:
        return found
    supported = ", ".join(dict.fromkeys(layout.quant_method for layout in LAYOUTS))
    raise CheckpointError(
        f"{fields.where}: quant_method {method!r:.80} ({key}) is not supported; these are: {supported}. Use "
        "one of them, an unquantized checkpoint or a GGUF file"
    )
