"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    last = fields.count("max_window_layers", least=0) if fields.flag("use_sliding_window") else 0
    return tuple(SLIDING if i % 2 == 0 and i < last else FULL for i in range(num_layers))


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    experts = ExpertsKind(
        fields.count("num_experts"),
        fields.count("moe_intermediate_size"),
        Router(fields.count("num_experts_per_tok"), fields.flag("norm_topk_prob")),
        shared=SharedExpert(fields.count("shared_expert_intermediate_size"), gated=True),
    )
    return with_experts(replace(config, qkv_bias=fields.flag("qkv_bias", True)), fields, experts)


ARCHITECTURE = Architecture(
    name="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    read=read,
    layer_types=layer_types,
    tensors={"mlp.shared_expert": "mlp.shared_experts"},
)
