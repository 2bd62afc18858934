"""compressed-tensors, the format of llm-compressor and vLLM, in three layouts: `pack-quantized`, 4 bits with
eight inputs in an int32, `float-quantized`, fp8 with a scale for each output, matrix or block, and
`mxfp4-pack-quantized`, e2m1 with two inputs in a byte and a power of two for each 32. Static scales of
activations in fp8 are not used: activations are scaled token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.kinds.quantization import Quantization
from shoal.models.configs.fields import ConfigFields
from shoal.models.layouts.layout import (
    HALVES,
    INPUT_SCALES,
    Layout,
    Stored,
    choice,
    group_size,
    joined,
    num_groups,
    num_groups_or_parts,
    of_whole_groups,
    unpack,
)

if TYPE_CHECKING:
    import torch

    from shoal.kernels.quant.fp8_tensor import Fp8Tensor
    from shoal.kernels.quant.int4_tensor import Int4Tensor
    from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

METHOD = "compressed-tensors"
INT4, FP8, MXFP4 = "pack-quantized", "float-quantized", "mxfp4-pack-quantized"
# nvfp4.py, int8.py and mxfp8.py
NVFP4, INT8, MXFP8 = "nvfp4-pack-quantized", "int-quantized", "mxfp8-quantized"
NAIVE = "naive-quantized"  # float-quantized, as the format's first tools wrote fp8
FORMATS, MIXED = (INT4, FP8, NAIVE, MXFP4, NVFP4, INT8, MXFP8), "mixed-precision"
# Words of config.json for act-order. With the latter, a tensor says which group each input belongs to.
IN_ORDER, ACT_ORDER = (None, False, "weight", "static"), (True, "group", "dynamic")


def read_weights(fields: ConfigFields, format: str) -> list[ConfigFields]:
    """Returns how the groups of matrices in this format are quantized."""
    given = choice(fields, "format", (*FORMATS, MIXED))
    choice(fields, "quantization_status", (None, "compressed", "frozen"))
    sparsity = fields.get("sparsity_config")
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":  # "dense": nothing is left out
        choice(fields, "sparsity_config", (None, {}))
    choice(fields, "transform_config", (None, {}))
    scheme = fields.get("kv_cache_scheme")  # Its scales are for kv_cache_dtype "fp8" (weights/kv_scales.py).
    if not isinstance(scheme, dict):
        choice(fields, "kv_cache_scheme", (None,))
    elif scheme:
        cache = ConfigFields(scheme, f"{fields.where}: kv_cache_scheme")
        choice(cache, "num_bits", (8,))
        choice(cache, "type", ("float",))
        choice(cache, "dynamic", (False, None))
    groups = fields.get("config_groups")
    if isinstance(groups, dict):
        groups = {name: group for name, group in groups.items() if not _is_attention(group)}
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise CheckpointError(f"{fields.where}: config_groups {groups!r:.80} says nothing about weights")
    found = []
    for name, group in groups.items():
        own = ConfigFields(group, f"{fields.where}: {name}")
        own_format = choice(own, "format", FORMATS if given == MIXED else (None, given)) or given
        if format != (FP8 if own_format == NAIVE else own_format):
            continue
        weights = own.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{own.where}: weights {weights!r:.80} is not an object")
        found.append(ConfigFields(weights, f"{own.where}: weights"))
        choice(own, "output_activations", (None,))
        activations = own.get("input_activations")
        if activations is None:
            continue
        if not isinstance(activations, dict):
            raise CheckpointError(f"{own.where}: input_activations {activations!r:.80} is not an object")
        inputs = ConfigFields(activations, f"{own.where}: input_activations")
        if format == NVFP4:
            choice(inputs, "num_bits", (4,))
            continue
        if choice(inputs, "dynamic", (True, False) if format in (FP8, INT8) else (True,)) is False:
            choice(inputs, "strategy", ("tensor",))
        choice(inputs, "type", ("int" if format == INT8 else "float",))
        choice(inputs, "num_bits", (8,))
    return found


def _is_attention(group: object) -> bool:
    """Says if a group quantizes queries, keys and values alone. kv_scales.py reads its scales."""
    if not isinstance(group, dict) or group.get("weights") is not None:
        return False
    targets = group.get("targets")
    return isinstance(targets, list) and all(
        str(one).endswith(("Attention", "self_attn$")) for one in targets
    )


def read_int4(fields: ConfigFields) -> Quantization | None:
    groups = read_weights(fields, INT4)
    return joined(_int4(weights) for weights in groups if choice(weights, "num_bits", (4, 8)) == 4)


def _int4(weights: ConfigFields) -> Quantization:
    choice(weights, "type", ("int",))
    by_group = choice(weights, "strategy", ("group", "channel")) == "group"
    return Quantization(
        INT4,
        4,
        (1, group_size(weights) if by_group else 0),
        zero_points=not weights.flag("symmetric", True),
        act_order=choice(weights, "actorder", IN_ORDER + ACT_ORDER) in ACT_ORDER,
    )


def int4_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, words = shapes["weight_packed"]
    return outs, 8 * words


def int4_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups_or_parts(inputs, quantization.block[1])
    stored = {
        "weight_packed": Stored((outs, inputs // 8), ("I32",)),
        "weight_scale": Stored((outs, groups), HALVES),
        "weight_shape": Stored((2,), ("I64", "I32")),
    }
    if quantization.zero_points:
        stored["weight_zero_point"] = Stored((-(-outs // 8), groups), ("I32",))
    if quantization.act_order:
        stored["weight_g_idx"] = Stored((inputs,), ("I32",))
    return stored


def join_int4(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Int4Tensor:
    from shoal.kernels.quant.int4_tensor import Int4Tensor

    quants = unpack(stored["weight_packed"], 1)
    if stored["weight_shape"].tolist() != list(quants.shape):
        raise CheckpointError(
            f"weight_shape is {stored['weight_shape'].tolist()}, but weight_packed holds {list(quants.shape)}"
        )
    zeros = unpack(stored["weight_zero_point"], 0)[: len(quants)] if quantization.zero_points else None
    scales, groups = stored["weight_scale"], stored.get("weight_g_idx")
    if groups is None:
        inputs, size = quants.shape[1], quantization.block[1]
        scales = of_whole_groups(scales, inputs, size)
        zeros = None if zeros is None else of_whole_groups(zeros, inputs, size)
    return Int4Tensor.of(quants, scales, zeros, groups)


def read_fp8(fields: ConfigFields) -> Quantization | None:
    return joined(map(_fp8, read_weights(fields, FP8)))


def _fp8(weights: ConfigFields) -> Quantization:
    choice(weights, "num_bits", (8,))
    choice(weights, "type", ("float",))
    choice(weights, "symmetric", (None, True))
    strategy = choice(weights, "strategy", ("channel", "tensor", "block"))
    block = (1 if strategy == "channel" else 0, 0)
    if strategy == "block":
        block = block_sizes(weights, "block_structure")
    return Quantization(FP8, 8, block)


def block_sizes(fields: ConfigFields, key: str) -> tuple[int, int]:
    sizes = fields.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise CheckpointError(f"{fields.where}: {key} {sizes!r:.80} is not two positive integers")
    return sizes[0], sizes[1]


def fp8_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, inputs = shapes["weight"]
    return outs, inputs


def fp8_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    tall, wide = quantization.block[0] or outs, quantization.block[1] or inputs
    blocks = (-(-outs // tall), -(-inputs // wide))
    scales = (1,) if quantization.block == (0, 0) else blocks
    return {"weight": Stored((outs, inputs), ("F8_E4M3",)), "weight_scale": Stored(scales, HALVES)}


def join_fp8(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Fp8Tensor:
    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    return Fp8Tensor.of(stored["weight"], stored["weight_scale"], quantization.block)


def fp8_zeros(outs: int, inputs: int, quantization: Quantization, device: torch.device) -> Fp8Tensor:
    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    return Fp8Tensor.zeros(outs, inputs, quantization.block, device)


def read_mxfp4(fields: ConfigFields) -> Quantization | None:
    return joined(map(_mxfp4, read_weights(fields, MXFP4)))


def _mxfp4(weights: ConfigFields) -> Quantization:
    choice(weights, "num_bits", (4,))
    choice(weights, "type", ("float",))
    choice(weights, "strategy", ("group",))
    choice(weights, "group_size", (32,))
    choice(weights, "symmetric", (None, True))
    return Quantization(MXFP4, 4, (1, 32))


def packed_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    outs, pairs = shapes["weight_packed"]
    return outs, 2 * pairs


def mxfp4_tensors(outs: int, inputs: int, quantization: Quantization) -> dict[str, Stored]:
    groups = num_groups(inputs, quantization.block[1])
    return {
        "weight_packed": Stored((outs, inputs // 2), ("U8",)),
        "weight_scale": Stored((outs, groups), ("U8",)),
    }


def join_mxfp4(stored: Mapping[str, torch.Tensor], quantization: Quantization) -> Mxfp4Tensor:
    from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

    return Mxfp4Tensor.of(stored["weight_packed"], stored["weight_scale"])


INT4_LAYOUT = Layout(INT4, METHOD, "weight_packed", read_int4, int4_shape, int4_tensors, join_int4)
FP8_LAYOUT = Layout(
    FP8,
    METHOD,
    "weight_scale",
    read_fp8,
    fp8_shape,
    fp8_tensors,
    join_fp8,
    fp8_zeros,
    is_fp8=True,
    unread=INPUT_SCALES,
)
MXFP4_LAYOUT = Layout(MXFP4, METHOD, "weight_packed", read_mxfp4, packed_shape, mxfp4_tensors, join_mxfp4)
