"""dots.llm1: Qwen3's attention and DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.gguf_names.experts import EXPERT_KEYS, EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    config = replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias)
    return with_experts(config, fields, routed_experts(fields, sigmoid_router(fields)))


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Layers from max_window_layers on have a window, if there is one."""
    first = num_layers
    if fields.get("sliding_window") is not None:
        first = fields.count("max_window_layers", least=0)
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))


ARCHITECTURE = Architecture(
    name="dots1",
    hf_class="Dots1ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    read=read,
    layer_types=layer_types,
    renamed={"num_local_experts": "n_routed_experts"},
    gguf=GGUFNames("dots1", tensors=EXPERT_TENSORS, keys=EXPERT_KEYS),
)
