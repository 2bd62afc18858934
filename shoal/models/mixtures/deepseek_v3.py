"""DeepSeek V3 and R1, and Kimi K2, whose files name the same class: latent attention, and experts whose
router is a sigmoid with a correction bias, in groups."""

from __future__ import annotations

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.configs.latent import with_latents

# fields that models of this class have with one value alone
FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    check_fixed(fields, FIXED)
    return with_experts(with_latents(config, fields), fields, routed_experts(fields, sigmoid_router(fields)))


ARCHITECTURE = Architecture(
    name="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "eos_token_id": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    read=read,
    nested_in=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    also_named=("kimi_k2",),
)
