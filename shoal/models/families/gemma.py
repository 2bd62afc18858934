"""Gemma of 2024: Llama's layer with zero-centred norms, GELU, and embeddings times sqrt(D)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import gemma3


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    gemma3.refuse_both_ways(fields)
    bias = fields.flag("attention_bias")
    return replace(
        config, norm="zero_centred", qkv_bias=bias, o_bias=bias, embedding_multiplier=config.hidden_size**0.5
    )


def _activation(fields: ConfigFields) -> Mapping[str, Any]:
    """The first configs say "gelu" and mean its approximation. Their hidden_activation is not read."""
    kind = fields.get("hidden_act")
    return {"hidden_act": "gelu_pytorch_tanh" if kind == "gelu" else kind, "hidden_activation": None}


ARCHITECTURE = Architecture(
    name="gemma",
    hf_class="GemmaForCausalLM",
    defaults={
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    read=read,
    said_otherwise=_activation,
    gguf=GGUFNames("gemma"),
)
