"""Mellum 2: Qwen3-MoE with windows in some layers, and a rope for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = Router(fields.count("num_experts_per_tok"), fields.flag("norm_topk_prob"))
    experts = ExpertsKind(fields.count("num_experts"), fields.count("moe_intermediate_size"), router)
    bias = fields.flag("attention_bias")
    return with_experts(replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias), fields, experts)


ARCHITECTURE = Architecture(
    name="mellum",
    hf_class="MellumForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
    },
    read=read,
    layer_types=lambda fields, num_layers: (FULL,) * num_layers,
    renamed={"num_local_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
