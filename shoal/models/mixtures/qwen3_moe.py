"""Qwen3-MoE: Qwen3 with mixtures of experts in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields, sliding_window
from shoal.models.gguf_names.experts import EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    num_experts, size = fields.count("num_experts", least=0), fields.count("moe_intermediate_size")
    router = Router(fields.count("num_experts_per_tok"), fields.flag("norm_topk_prob"))
    if fields.flag("use_sliding_window"):
        config = config.with_attention(window=sliding_window(fields))
    bias = fields.flag("attention_bias")
    config = replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return with_experts(config, fields, ExpertsKind(num_experts, size, router) if num_experts else None)


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    read=read,
    nested_in=("InternVLForConditionalGeneration",),
    renamed={"num_local_experts": "num_experts"},  # by transformers 5
    gguf=GGUFNames(
        "qwen3moe",
        also_named=("qwen3vlmoe",),
        tensors=EXPERT_TENSORS,
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # GGUF does not say it; the published models do
        values={"norm_topk_prob": True},
    ),
)
