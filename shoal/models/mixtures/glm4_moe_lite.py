"""GLM-4.7-Flash: DeepSeek V3's layers in other sizes. The first layer is dense."""

from __future__ import annotations

from shoal.models.architecture import Architecture
from shoal.models.mixtures.deepseek_v3 import read

ARCHITECTURE = Architecture(
    name="glm4_moe_lite",
    hf_class="Glm4MoeLiteForCausalLM",
    defaults={
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "head_dim": 64,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
    },
    read=read,
    # transformers' head_dim of this class. The head size that no heads divide is not one of attention.
    renamed={"qk_rope_head_dim": "head_dim"},
)
