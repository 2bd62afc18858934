"""GLM-4.5, 4.6 and 4.7: a sigmoid router with a correction bias, a shared expert, and dense first layers.
Half of each head is rotated. GLM-4.5V's and 4.6V's text model is the same."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.gguf_names.experts import EXPERT_KEYS, EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = replace(config, qk_norm=fields.flag("use_qk_norm"), qkv_bias=fields.flag("attention_bias"))
    return with_experts(config, fields, routed_experts(fields, sigmoid_router(fields)))


ARCHITECTURE = Architecture(
    name="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    read=read,
    renamed={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    gguf=GGUFNames(
        "glm4moe",
        tensors={**EXPERT_TENSORS, "post_attention_norm": "post_attention_layernorm"},
        keys=EXPERT_KEYS,
    ),
)
VISION = replace(
    ARCHITECTURE,
    name="glm4v_moe_text",
    hf_class="Glm4vMoeForConditionalGeneration",
    defaults={**ARCHITECTURE.defaults, "max_position_embeddings": 65536, "attention_bias": True},
    gguf=None,
)
