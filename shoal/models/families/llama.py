"""Llama, and what is built like it under its name: SmolLM2, TinyLlama and many others."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


ARCHITECTURE = Architecture(
    name="llama",
    hf_class="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": None, "eos_token_id": 2},
    read=read,
    gguf=GGUFNames("llama", refused={"expert_count": "Mixtral"}, interleaved=True),
)
