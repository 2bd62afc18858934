"""Qwen3: a norm of each head of q and k; windows as in Qwen2."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import qwen2


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    layers = qwen2.windowed(config.layers, fields)
    return replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias, layers=layers)


ARCHITECTURE = Architecture(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    read=read,
    nested_in=("InternVLForConditionalGeneration",),
    gguf=GGUFNames("qwen3", also_named=("qwen3vl",)),
)
