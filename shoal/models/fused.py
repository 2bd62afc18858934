"""A decoder's layers as one C call (kernels/cpu_layers.py), where they are such that it can run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.kernels.cpu_layers import CpuLayers, LayerWeights
from shoal.kernels.cpu_linear import PackedWeight
from shoal.kernels.step_input import AttentionBackend
from shoal.layers.mlp import MLP
from shoal.model_config import ModelConfig


def fuse_layers(layers: Iterable, config: ModelConfig, backend: AttentionBackend) -> CpuLayers | None:
    """None unless every product of every layer is packed for the C library, whole on this rank, and no layer
    is a mixture of experts."""
    weights = []
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(mlp, MLP):
            return None
        linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        if any(linear.tp.size > 1 or not isinstance(linear.packed, PackedWeight) for linear in linears):
            return None
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
        values: list[Any] = [linear.packed for linear in linears] + [linear.bias for linear in linears]
        values += [None if norm is None else norm.weight for norm in norms] + [attention.window]
        weights.append(LayerWeights(*values))
    return CpuLayers(weights, config.num_heads, config.rms_norm_eps, backend.scale)
