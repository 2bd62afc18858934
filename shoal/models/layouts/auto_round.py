"""AutoRound (Intel) as its own tool stores it: matrices lie as GPTQ's or AWQ's do, and the config says which,
with a list of the matrices that differ from the others."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts import awq, gptq
from shoal.models.layouts.layout import Stored, choice, group_size

METHOD, GPTQ, AWQ = "auto-round", "auto-round-gptq", "auto-round-awq"
# packing_format -> the layout, and whether zero points are stored minus one
PACKINGS = {
    "auto_round:auto_gptq": (GPTQ, True),
    "auto_round": (GPTQ, False),
    "auto_round:gptqmodel": (GPTQ, False),
    "auto_round:auto_awq": (AWQ, False),
}
PLAIN_BITS = (16, 32)


def read_gptq(fields: ConfigFields) -> Quantization | None:
    return _read(fields, GPTQ)


def read_awq(fields: ConfigFields) -> Quantization | None:
    return _read(fields, AWQ)


def _read(fields: ConfigFields, layout: str) -> Quantization | None:
    """Returns None for the other layout. Raises CheckpointError where some matrices have other bits or
    groups."""
    fields = ConfigFields({"packing_format": "auto_round:auto_gptq", **fields.values}, fields.where)
    found, minus_one = PACKINGS[str(choice(fields, "packing_format", tuple(PACKINGS)))]
    if found != layout:
        return None
    choice(fields, "bits", (4,))
    choice(fields, "data_type", (None, "int"))
    choice(fields, "act_bits", (None, *PLAIN_BITS))
    choice(fields, "rotation_config", (None, {}))
    others = fields.get("extra_config") or {}
    if not isinstance(others, dict) or not all(isinstance(own, dict) for own in others.values()):
        raise CheckpointError(
            f"{fields.where}: extra_config must have an object for each matrix, got {others!r:.80}"
        )
    for name, own in others.items():
        matrix = ConfigFields({**fields.values, **own}, f"{fields.where}: extra_config: {name!s:.80}")
        if choice(matrix, "bits", (4, *PLAIN_BITS)) == 4:
            choice(matrix, "data_type", (None, "int"))
            choice(matrix, "group_size", (fields.get("group_size"),))
    return Quantization(layout, 4, (1, group_size(fields)), zero_points=True, zeros_minus_one=minus_one)


def gptq_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    stored = gptq.tensors(outs, inputs, quantization)
    del stored["g_idx"]  # Inputs are in order, and only some versions say so.
    return stored


GPTQ_LAYOUT = replace(
    gptq.LAYOUT, name=GPTQ, quant_method=METHOD, read=read_gptq, tensors=gptq_tensors, unread=("g_idx",)
)
AWQ_LAYOUT = replace(awq.LAYOUT, name=AWQ, quant_method=METHOD, read=read_awq)
