"""DeepSeek V2 and V2-Lite: latent attention, and experts whose router is a softmax. Experts are chosen out of
all, or out of the groups with the best expert (`topk_method`)."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.kinds.experts import Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import routed_experts, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.latent import with_latents
from shoal.models.gguf_names.experts import LATENT_KEYS, LATENT_TENSORS, SIGMOID, latents

GROUPED = {"greedy": False, "group_limited_greedy": True}


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    method = fields.get("topk_method")
    if not isinstance(method, str) or method not in GROUPED:
        raise CheckpointError(
            f"{fields.where}: topk_method must be {' or '.join(GROUPED)}, got {method!r:.80}; other routers "
            "are not supported"
        )
    router = Router(
        fields.count("num_experts_per_tok"),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.count("n_group") if GROUPED[method] else 1,
        top_k_groups=fields.count("topk_group") if GROUPED[method] else 1,
        group_score="maximum",
        float32=True,
    )
    return with_experts(with_latents(config, fields), fields, routed_experts(fields, router))


ARCHITECTURE = Architecture(
    name="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    read=read,
    said_otherwise=lambda fields: {"rope_interleave": True},  # transformers does not read the field
    gguf=GGUFNames(
        "deepseek2",
        tensors=LATENT_TENSORS,
        keys=LATENT_KEYS,
        derived=latents,
        others={"expert_gating_func": {SIGMOID: "deepseek_v3"}},  # and GLM-4.7-Flash's
    ),
)
