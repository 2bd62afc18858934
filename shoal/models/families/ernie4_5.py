"""ERNIE 4.5, dense: Llama that rotates pairs of neighbouring numbers."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("use_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


ARCHITECTURE = Architecture(
    name="ernie4_5",
    hf_class="Ernie4_5ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
    read=read,
    interleaved=True,
    gguf=GGUFNames("ernie4_5"),
)
