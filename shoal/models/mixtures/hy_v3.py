"""Hunyuan 3: Qwen3's attention, and experts whose router is a sigmoid with a correction bias after a dense
layer."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import routed_experts, with_experts
from shoal.models.configs.fields import ConfigFields


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = Router(
        fields.count("num_experts_per_tok"),
        renormalize=True,
        scores="sigmoid",
        eps=1e-20,
        scale=fields.number("router_scaling_factor"),
        float32=True,
        correction=True,
    )
    experts = routed_experts(fields, router, "num_experts", "num_shared_experts")
    if experts.shared is None:  # in transformers a shared expert of 0 experts has a dense layer's width
        experts = replace(experts, shared=SharedExpert(fields.count("intermediate_size")))
    bias = fields.flag("attention_bias")
    config = replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    return with_experts(config, fields, experts)


ARCHITECTURE = Architecture(
    name="hy_v3",
    hf_class="HYV3ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "first_k_dense_replace": 1,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
        "num_nextn_predict_layers": 1,  # transformers leaves the layer after the last one out
    },
    read=read,
    renamed={"num_local_experts": "num_experts"},
    tensors={
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",  # a trainer's
        "mlp.shared_mlp": "mlp.shared_experts",
    },
)
