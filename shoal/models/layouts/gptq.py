"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: 4 bits, eight inputs in an int32. With
act-order (`desc_act`), a tensor says which group each input belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
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

ONES = 0x11111111  # eight times the 4-bit number 1


def read(fields: ConfigFields) -> Quantization | None:
    if 4 not in bits_of_matrices(fields):
        return None
    return Quantization(
        "gptq",
        4,
        (1, group_size(fields)),
        zero_points=True,
        act_order=fields.flag("desc_act"),
        zeros_minus_one=is_first_version(fields),
    )


def bits_of_matrices(fields: ConfigFields) -> set[object]:
    """Returns the numbers of bits of the matrices. GPTQModel's `dynamic` names matrices that have other ones;
    those that are plain are seen by their tensors."""
    found = {choice(fields, "bits", (4, 8))}
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{fields.where}: dynamic must be an object, got {dynamic!r:.80}")
    for name, own in dynamic.items():
        if isinstance(own, dict) and not str(name).startswith("-:"):
            matrix = ConfigFields({**fields.values, **own}, f"{fields.where}: dynamic: {name!s:.80}")
            choice(matrix, "group_size", (fields.get("group_size"),))
            found.add(choice(matrix, "bits", (4, 8)))
    return found


def is_first_version(fields: ConfigFields) -> bool:
    """Says if zero points are stored minus one."""
    choice(fields, "pack_dtype", (None, "int32"))
    # Tools write the version under either name, or under both.
    versions = {choice(fields, key, (None, "gptq", "gptq_v2")) for key in ("checkpoint_format", "format")}
    versions.discard(None)
    if len(versions) > 1:
        raise CheckpointError(f"{fields.where}: checkpoint_format and format contradict each other")
    return "gptq_v2" not in versions


def matrix_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    words, outs = shapes["qweight"]
    return outs, 8 * words


def tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups_or_parts(inputs, quantization.block[1])
    return {
        "qweight": Stored((inputs // 8, outs), ("I32",)),
        "qzeros": Stored((groups, outs // 8), ("I32",)),
        "scales": Stored((groups, outs), HALVES),
        "g_idx": Stored((inputs,), ("I32",)),
    }


def is_in_order(groups: torch.Tensor, size: int) -> bool:
    import torch

    return torch.equal(groups.long(), torch.arange(len(groups)) // (size or len(groups)))


def join(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Int4Tensor:
    from shoal.kernels.quant.int4_tensor import Int4Tensor

    # The first version stores zero points less one, by a subtraction from the whole int32: a zero point of 0
    # borrows from its neighbour, and the sum gives that back.
    words = stored["qzeros"] + ONES if quantization.zeros_minus_one else stored["qzeros"]
    quants, zeros, scales = unpack(stored["qweight"], 0).T, unpack(words, 1).T, stored["scales"].T
    groups, inputs, size = stored.get("g_idx"), quants.shape[1], quantization.block[1]
    if groups is None or is_in_order(groups, size):
        zeros, scales = (of_whole_groups(numbers, inputs, size) for numbers in (zeros, scales))
        groups = None
    tensor = Int4Tensor.of(quants, scales, zeros, groups)
    if tensor.groups is not None and not quantization.act_order:
        raise CheckpointError(
            "g_idx puts inputs into groups out of order, but desc_act is false in the config; is it another "
            "checkpoint's config?"
        )
    return tensor


LAYOUT = Layout("gptq", "gptq", "qweight", read, matrix_shape, tensors, join)
