"""Integers of 8 bits with a scale for each output or group, and no zero points: GPTQ's, and in
compressed-tensors `pack-quantized` (four in an int32) and `int-quantized`, whose activations are not rounded
to 8 bits here. They become GGUF's Q8_0, whose groups of 32 repeat a scale in float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.compressed_tensors import (
    IN_ORDER,
    INT4,
    INT8,
    METHOD,
    fp8_shape,
    fp8_tensors,
    read_weights,
)
from shoal.models.layouts.gptq import bits_of_matrices, is_first_version, is_in_order
from shoal.models.layouts.layout import (
    HALVES,
    INPUT_SCALES,
    Layout,
    Stored,
    choice,
    group_size,
    joined,
    num_groups_or_parts,
    of_whole_groups,
)

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.gguf_tensor import GGUFTensor

ZERO = 128  # the byte without a sign that means 0
GROUP = 32  # inputs of a group in Q8_0


def read_gptq(fields: ConfigFields) -> Quantization | None:
    if 8 not in bits_of_matrices(fields):
        return None
    choice(fields, "sym", (True,))
    choice(fields, "desc_act", (None, False))
    block = (1, group_size(fields))
    return Quantization("gptq-int8", 8, block, zeros_minus_one=is_first_version(fields))


def read_packed(fields: ConfigFields) -> Quantization | None:
    groups = read_weights(fields, INT4)
    return joined(_read(weights, "packed-int8") for weights in groups if weights.get("num_bits") == 8)


def read_plain(fields: ConfigFields) -> Quantization | None:
    return joined(_read(weights, INT8) for weights in read_weights(fields, INT8))


def _read(weights: ConfigFields, layout: str) -> Quantization:
    choice(weights, "num_bits", (8,))
    choice(weights, "type", ("int",))
    choice(weights, "symmetric", (None, True))
    choice(weights, "actorder", IN_ORDER)
    strategy = choice(weights, "strategy", ("channel", "tensor", "group"))
    if strategy == "group":
        return Quantization(layout, 8, (1, group_size(weights)))
    return Quantization(layout, 8, (1 if strategy == "channel" else 0, 0))


def gptq_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    words, outs = shapes["qweight"]
    return outs, 4 * words


def gptq_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups_or_parts(inputs, quantization.block[1])
    return {
        "qweight": Stored((inputs // 4, outs), ("I32",)),
        "qzeros": Stored((groups, outs // 4), ("I32",)),
        "scales": Stored((groups, outs), HALVES),
        "g_idx": Stored((inputs,), ("I32",)),
    }


def packed_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, words = shapes["weight_packed"]
    return outs, 4 * words


def packed_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    return {
        "weight_packed": Stored((outs, inputs // 4), ("I32",)),
        "weight_scale": fp8_tensors(outs, inputs, quantization)["weight_scale"],
        "weight_shape": Stored((2,), ("I64", "I32")),
    }


def plain_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    return fp8_tensors(outs, inputs, quantization) | {"weight": Stored((outs, inputs), ("I8",))}


def join_gptq(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> GGUFTensor:
    zeros = _bytes(stored["qzeros"], 1)
    if bool((zeros != ZERO - quantization.zeros_minus_one).any()):
        raise CheckpointError(
            "qzeros has zero points, but sym is true in the config; is it another checkpoint's config?"
        )
    groups, size = stored.get("g_idx"), quantization.block[1]
    if groups is not None and not is_in_order(groups, size):
        raise CheckpointError(
            "g_idx puts inputs into groups out of order, but desc_act is false in the config"
        )
    quants = (_bytes(stored["qweight"], 0) ^ ZERO).T
    return _joined(quants, of_whole_groups(stored["scales"].T, quants.shape[1], size))


def join_packed(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> GGUFTensor:
    quants = _bytes(stored["weight_packed"], 1) ^ ZERO
    return _joined(quants, of_whole_groups(stored["weight_scale"], quants.shape[1], quantization.block[1]))


def join_plain(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> GGUFTensor:
    import torch

    quants = stored["weight"].view(torch.uint8)
    return _joined(quants, of_whole_groups(stored["weight_scale"], quants.shape[1], quantization.block[1]))


def _bytes(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The four bytes of each int32 side by side along `dim`, uint8."""
    import torch

    parts = [((words >> shift) & 255).to(torch.uint8) for shift in range(0, 32, 8)]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def _joined(quants_OI: torch.Tensor, scales: torch.Tensor) -> GGUFTensor:
    """From the bytes of numbers with a sign, and scales that are one number or [O, groups]."""
    import numpy as np
    import torch

    from shoal.kernels.quant.gguf_tensor import GGUFTensor

    outs, inputs = quants_OI.shape
    of_rows = scales.float().view(-1, scales.shape[-1]).expand(outs, -1)
    size = inputs // of_rows.shape[1]
    if size % GROUP:
        raise CheckpointError(
            f"a matrix of shape {[outs, inputs]} in 8 bits has groups of {size} inputs, but they must be "
            f"multiples of {GROUP}; take a checkpoint in fp8 or in 4 bits"
        )
    heads = of_rows.half().repeat_interleave(size // GROUP, dim=1).unsqueeze(2)
    if not heads.isfinite().all():
        raise CheckpointError("scales are NaN, infinite or beyond float16; the file is damaged")
    rows = torch.cat((heads.view(torch.uint8), quants_OI.contiguous().unflatten(1, (-1, GROUP))), dim=2)
    data: np.ndarray = rows.flatten(1).numpy()
    return GGUFTensor("Q8_0", (outs, inputs), data)


GPTQ_LAYOUT = Layout("gptq-int8", "gptq", "qweight", read_gptq, gptq_shape, gptq_tensors, join_gptq)
PACKED_LAYOUT = Layout(
    "packed-int8", METHOD, "weight_packed", read_packed, packed_shape, packed_tensors, join_packed
)
PLAIN_LAYOUT = Layout(
    INT8,
    METHOD,
    "weight_scale",
    read_plain,
    fp8_shape,
    plain_tensors,
    join_plain,
    unread=(*INPUT_SCALES, "input_zero_point"),
)
