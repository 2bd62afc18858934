"""A decoder's layers as one C call (layers/cpu_layers.py), where they are such that it can run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shoal.kernels.cpu.linear import CpuWeight
from shoal.layers.attention import Attention
from shoal.layers.cpu_layers import CpuLayers, LayerWeights
from shoal.layers.mlp import MLP
from shoal.model_config import AttentionKind, ModelConfig
from shoal.models.decoder_layers.decoder_layer import DecoderLayer
from shoal.models.decoder_layers.sandwich_layer import SandwichLayer


def fuse_layers(layers: Iterable, config: ModelConfig) -> CpuLayers | None:
    """None where the C call can't run them. It knows dense layers of the Llama line and of Gemma 3, without
    multipliers, which differ in window and rope at most, without additions to attention, and matmuls that are
    packed for the C library and whole on this rank."""
    weights, mixer = [], config.layers[0].mixer
    if not isinstance(mixer, AttentionKind):
        return None
    plain = AttentionKind(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale, mixer.rope)
    for other in (kind.mixer for kind in config.layers):
        if not isinstance(other, AttentionKind) or other.rotary_dim != other.head_dim:
            return None
        if other != replace(plain, rope=other.rope, window=other.window):
            return None
    for layer in layers:
        if type(layer) not in (DecoderLayer, SandwichLayer) or not isinstance(layer.mlp, MLP):
            return None
        is_sandwich = isinstance(layer, SandwichLayer)
        mlp_norm = layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, Attention)
        packed = []
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            held = getattr(linear.format, "packed", None)
            if linear.tp.size > 1 or linear.multiplier != 1.0 or not isinstance(held, CpuWeight):
                return None
            packed.append(held)
        qkv, o, gate_up, down = packed
        weights.append(
            LayerWeights(
                qkv=qkv,
                o=o,
                gate_up=gate_up,
                down=down,
                qkv_bias=attention.qkv_proj.bias,
                o_bias=attention.o_proj.bias,
                gate_up_bias=mlp.gate_up_proj.bias,
                down_bias=mlp.down_proj.bias,
                input_norm=layer.input_layernorm.weight,
                mlp_norm=mlp_norm.weight,
                q_norm=None if attention.q_norm is None else attention.q_norm.weight,
                k_norm=None if attention.k_norm is None else attention.k_norm.weight,
                after_attention=layer.post_attention_layernorm.weight if is_sandwich else None,
                after_mlp=layer.post_feedforward_layernorm.weight if is_sandwich else None,
            )
        )
    return CpuLayers(weights, mixer.num_heads, config.rms_norm_eps, mixer.scale, config.activation)
