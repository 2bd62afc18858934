"""Granite SWA: Granite 3 with windows in three of four layers, sinks in all, and a rope for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING, attention_of
from shoal.models.families import granite


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = granite.read(config, fields).with_attention(sinks=True)
    if fields.get("layer_rope_theta") is None:
        return config
    thetas = fields.each("layer_rope_theta", config.num_layers)
    return replace(config, layers=tuple(map(with_theta, config.layers, thetas)))


def with_theta(kind: LayerKind, theta: ConfigFields) -> LayerKind:
    """Returns the kind with a layer's own theta; 0 is a layer that does not rotate q and k."""
    rope = attention_of(kind).rope
    if rope is None or theta.get("layer_rope_theta") == 0:
        return kind.with_attention(rope=None)
    return kind.with_attention(rope=replace(rope, theta=theta.number("layer_rope_theta")))


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    return tuple(SLIDING if i % 4 else FULL for i in range(num_layers))


def _gguf_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """A file has one theta, and may have a flag of each layer for whether it rotates q and k."""
    if fields.get("rope_pattern") is None:
        return {}
    flags = fields.each("rope_pattern", fields.count("num_hidden_layers"))
    theta = fields.get("rope_parameters")["rope_theta"]
    return {"layer_rope_theta": [theta if flag.flag("rope_pattern") else 0 for flag in flags]}


ARCHITECTURE = Architecture(
    name="granite_swa",
    hf_class="GraniteSWAForCausalLM",
    defaults={
        **granite.ARCHITECTURE.defaults,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 100257,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    read=read,
    layer_types=layer_types,
    gguf=GGUFNames(
        "granite_swa",
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        keys={**granite.GGUF_KEYS, "attention.rope_pattern": "rope_pattern"},
        refused={"expert_count": "a mixture of experts"},
        derived=_gguf_fields,
        interleaved=True,
        by_layer=("rope_pattern",),
    ),
)
