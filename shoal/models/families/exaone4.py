"""EXAONE 4: OLMo 2's layer with a norm of each head of q and k. Where some layers have windows, those without
do not rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, full_every, rotating_in_windows

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    if fields.get("sliding_window") is not None:
        config = rotating_in_windows(config)
    return replace(config, qk_norm=True)


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    if fields.get("sliding_window") is None:
        return (FULL,) * num_layers
    return full_every(fields.count("sliding_window_pattern"), num_layers)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.olmo2_layer import HeadNormOlmo2Layer

    return HeadNormOlmo2Layer


ARCHITECTURE = Architecture(
    name="exaone4",
    hf_class="Exaone4ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    read=read,
    layer_types=layer_types,
    nested_in=("Exaone4_5_ForConditionalGeneration",),
    also_named=("exaone4_5_text",),
    layer_class=layer_class,
    gguf=GGUFNames(
        "exaone4",
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
)
