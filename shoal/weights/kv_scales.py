"""A checkpoint's scales of an fp8 KV cache: a stored number times its scale is the key or value.

Names follow compressed-tensors (`self_attn.k_scale`), ModelOpt (`self_attn.k_proj.k_scale`) or AutoFP8
(`self_attn.kv_scale`, for keys and values). A scale is one number for a layer, or one for each of its kv
heads. No layer loads scales, and an engine without an fp8 cache ignores them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from shoal.errors import CheckpointError
from shoal.weights.quantized import EVERY_DTYPE
from shoal.weights.safetensors import KV_SCALE, safetensors_tensors
from shoal.weights.source import CheckpointFiles


def kv_scales(files: CheckpointFiles) -> list[torch.Tensor] | None:
    """Returns float32 [2, kv heads] for each layer, keys' scales before values'; 1 for a layer that reads
    another layer's cache. None: the checkpoint has no scales. Raises CheckpointError if a scale is missing,
    has another shape, or is not positive."""
    if files.file is not None:  # GGUF has no such tensors
        return None
    config, found = files.config, False
    attentions = [kind.attention for kind in config.layers]
    num_heads = [0 if attention is None else attention.num_kv_heads for attention in attentions]
    scales = [
        torch.full(
            (2, heads), 0.0 if attention is None or attention.kv_layer is None else 1.0, dtype=torch.float32
        )
        for heads, attention in zip(num_heads, attentions)
    ]
    for name, tensor in safetensors_tensors(files.folder, EVERY_DTYPE):
        if (match := KV_SCALE.fullmatch(name)) is None or match[2] == "q":  # queries are not rounded
            continue
        found, layer, values = True, int(match[1]), tensor.float().flatten()
        if layer >= config.num_layers:
            raise CheckpointError(
                f"{files.path}: {name} belongs to layer {layer}, but the model has {config.num_layers}; is "
                "it another model's file?"
            )
        num_kv_heads = num_heads[layer]
        if len(values) not in (1, num_kv_heads):
            raise CheckpointError(
                f"{files.path}: {name} has shape {list(tensor.shape)}, but a scale of the KV cache is one "
                f"number, or one for each of {num_kv_heads} kv heads"
            )
        if not (values.isfinite() & (values > 0)).all():
            raise CheckpointError(
                f"{files.path}: {name} has {values.min():g} to {values.max():g}, but scales are positive "
                "numbers; the file is damaged, or was never calibrated"
            )
        for kind in match[2]:
            scales[layer]["kv".index(kind)] = values
    if not found:
        return None
    for layer, scales_2G in enumerate(scales):
        for kind in (scales_2G == 0).any(1).nonzero().flatten().tolist():
            raise CheckpointError(
                f"{files.path}: the checkpoint has scales of the KV cache, but lacks {'kv'[kind]}_scale of "
                f"layer {layer}; is a shard missing?"
            )
    return scales


def name_of(scales: Sequence[torch.Tensor]) -> str:
    """Returns a name for these scales. Caches with other scales hold other numbers."""
    return xxhash.xxh3_64_hexdigest(b"".join(scales_2G.numpy().tobytes() for scales_2G in scales))
