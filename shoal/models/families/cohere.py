"""Cohere's Command R and Command A: attention and MLP side by side after one LayerNorm, and pairs of
neighbouring numbers rotated. Models from Command R7B on have windows in three of four layers, and no rope in
the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.configs.layers import full_every, rotating_in_windows

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    check_fixed(fields, {"use_qk_norm": False})
    bias, scale = fields.flag("attention_bias"), fields.number("logit_scale")
    return replace(config, norm="layer", qkv_bias=bias, o_bias=bias, logits_scaling=1.0 / scale)


def read_windowed(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return read(rotating_in_windows(config), fields)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.parallel_layer import ParallelLayer

    return ParallelLayer


GGUF_KEYS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
COHERE = Architecture(
    name="cohere",
    hf_class="CohereForCausalLM",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
    },
    read=read,
    said_otherwise=lambda fields: {"rms_norm_eps": fields.get("layer_norm_eps")},
    interleaved=True,
    layer_class=layer_class,
    gguf=GGUFNames("command-r", keys=GGUF_KEYS),
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    hf_class="Cohere2ForCausalLM",
    defaults={
        **{key: value for key, value in COHERE.defaults.items() if key != "rope_theta"},
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    read=read_windowed,
    layer_types=lambda fields, n: full_every(fields.count("sliding_window_pattern"), n),
    gguf=GGUFNames("cohere2", keys=GGUF_KEYS),
)
