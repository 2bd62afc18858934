"""Solar Open: Llama's attention and GLM-4.5's experts, in all layers."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = replace(config, qkv_bias=fields.flag("attention_bias"))
    return with_experts(config, fields, routed_experts(fields, sigmoid_router(fields)))


ARCHITECTURE = Architecture(
    name="solar_open",
    hf_class="SolarOpenForCausalLM",
    defaults={
        "intermediate_size": 10240,  # no layer is dense
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "norm_topk_prob": True,
    },
    read=read,
    renamed={"num_local_experts": "n_routed_experts"},
)
