"""Muse Glimmer: sandwiches of zero-centred norms, gated attention with windows in three of four layers and
without rope in the others, and normed embeddings. Its text model comes within a multimodal one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.kinds.attention import OutputGate
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, attention_of, full_every
from shoal.models.gguf_names.gemma import SANDWICH_TENSORS

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    # queries are multiplied by qk_scale_factor, which is a factor of all scores
    has_weights = fields.flag("use_qk_norm")  # GGUF files have it as weights of a norm
    scale = config.attention.scale * (1.0 if has_weights else fields.number("qk_scale_factor"))
    config = config.with_attention(scale=scale, qk_rms=not has_weights, gate=OutputGate("sigmoid"))
    bias = fields.flag("attention_bias")
    return replace(
        config,
        norm="float32",
        qk_norm=has_weights,
        post_norm_eps=fields.number("post_norm_eps"),
        embedding_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_scaling=1.0 / fields.number("output_multiplier"),
        logits_softcap=fields.number("final_logit_softcapping"),
        layers=tuple(
            kind.with_attention(rope=attention_of(kind).rope if rotates else None)
            for kind, rotates in zip(config.layers, rotated(fields, config.num_layers))
        ),
    )


def rotated(fields: ConfigFields, num_layers: int) -> list[bool]:
    """For each layer, True if it rotates q and k. A theta other than 0 means the global one."""
    if fields.get("layer_rope_theta") is None:
        return [kind != FULL for kind in layer_types(fields, num_layers)]
    return [each.get("layer_rope_theta") != 0 for each in fields.each("layer_rope_theta", num_layers)]


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    return full_every(4, num_layers + -num_layers % 4)[-num_layers:]


def rotated_layers(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields that a GGUF file does not say: layers with a window rotate, and the others do not."""
    kinds = fields.get("layer_types") or layer_types(fields, fields.count("num_hidden_layers"))
    return {"layer_rope_theta": [0 if kind == FULL else 1 for kind in kinds]}


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.muse_layer import MuseLayer

    return MuseLayer


ARCHITECTURE = Architecture(
    name="muse_glimmer_text",
    hf_class="MuseGlimmerForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 200001,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
    },
    read=read,
    layer_types=layer_types,
    nested_in=("MuseGlimmerForConditionalGeneration",),
    layer_class=layer_class,
    gguf=GGUFNames(
        "muse-glimmer",
        tensors={**SANDWICH_TENSORS, "attn_gate": "self_attn.gate_proj"},
        keys={"logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping"},
        derived=rotated_layers,
        interleaved=True,
        raised=("layernorm.weight",),
    ),
)
