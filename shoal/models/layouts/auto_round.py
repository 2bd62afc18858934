"""AutoRound (Intel) as its own tool stores it: matrices are stored as by GPTQ or AWQ, and the config says
which, with a list of the matrices that differ from the others."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts import awq, gptq, int8
from shoal.models.layouts.layout import Layout, Stored, choice, group_size

METHOD, GPTQ, GPTQ8, AWQ = "auto-round", "auto-round-gptq", "auto-round-gptq-int8", "auto-round-awq"
# packing_format -> the layout of each number of bits, and whether zero points are stored minus one
PACKINGS = {
    "auto_round:auto_gptq": ({4: GPTQ, 8: GPTQ8}, True),
    "auto_round": ({4: GPTQ, 8: GPTQ8}, False),
    "auto_round:gptqmodel": ({4: GPTQ, 8: GPTQ8}, False),
    "auto_round:auto_awq": ({4: AWQ}, False),
}
PLAIN_BITS = (16, 32)


def read(fields: ConfigFields) -> Quantization:
    """Returns the layout of most matrices, with the other one where extra_config has matrices of other bits.
    Raises CheckpointError for bits that are not supported and for groups of several sizes."""
    fields = ConfigFields({"packing_format": "auto_round:auto_gptq", **fields.values}, fields.where)
    layouts, minus_one = PACKINGS[str(choice(fields, "packing_format", tuple(PACKINGS)))]
    choice(fields, "act_bits", (None, *PLAIN_BITS))
    choice(fields, "rotation_config", (None, {}))
    others = fields.get("extra_config") or {}
    if not isinstance(others, dict) or not all(isinstance(own, dict) for own in others.values()):
        raise CheckpointError(
            f"{fields.where}: extra_config must have an object for each matrix, got {others!r:.80}"
        )
    found = {_bits(fields, tuple(layouts)): None}
    for name, own in others.items():
        matrix = ConfigFields({**fields.values, **own}, f"{fields.where}: extra_config: {name!s:.80}")
        if matrix.get("bits") not in PLAIN_BITS:
            found[_bits(matrix, tuple(layouts))] = None
            choice(matrix, "group_size", (fields.get("group_size"),))
    block = (1, group_size(fields))
    first, *more = (
        Quantization(layouts[bits], bits, block, zero_points=bits == 4, zeros_minus_one=minus_one)
        for bits in found
    )
    return replace(first, others=tuple(more))


def _bits(fields: ConfigFields, allowed: tuple[int, ...]) -> int:
    bits = choice(fields, "bits", allowed)
    choice(fields, "data_type", (None, "int"))
    if bits == 8:
        choice(fields, "sym", (None, True))
    assert isinstance(bits, int)
    return bits


def _without_groups(layout: Layout, name: str) -> Layout:
    """GPTQ's layout without g_idx: AutoRound keeps inputs in order, and only some versions store g_idx."""

    def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
        stored = layout.tensors(outs, inputs, quantization)
        del stored["g_idx"]
        return stored

    return replace(layout, name=name, quant_method=METHOD, read=read, tensors=tensors, unread=("g_idx",))


GPTQ_LAYOUT = _without_groups(gptq.LAYOUT, GPTQ)
GPTQ8_LAYOUT = _without_groups(int8.GPTQ_LAYOUT, GPTQ8)
AWQ_LAYOUT = replace(awq.LAYOUT, name=AWQ, quant_method=METHOD, read=read)
