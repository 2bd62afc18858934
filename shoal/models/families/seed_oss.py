"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


ARCHITECTURE = Architecture(
    name="seed_oss",
    hf_class="SeedOssForCausalLM",
    defaults={
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "eos_token_id": 2,
    },
    read=read,
    gguf=GGUFNames("seed_oss", tensors={"post_attention_norm": "post_attention_layernorm"}),
)
