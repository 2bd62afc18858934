"""Mistral: Llama with a window of positions that each token sees. Its GGUF files say that they are
Llama's. Ministral of 2024 has windows in the layers that layer_types names."""

from __future__ import annotations

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.fields import ConfigFields, sliding_window
from shoal.models.configs.layers import FULL, SLIDING


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return config.with_attention(window=sliding_window(fields))


ARCHITECTURE = Architecture(
    name="mistral",
    hf_class="MistralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
    read=read,
    nested_in=("Mistral3ForConditionalGeneration",),
)
MINISTRAL = Architecture(
    name="ministral",
    hf_class="MinistralForCausalLM",
    defaults=ARCHITECTURE.defaults,
    layer_types=lambda fields, n: ((SLIDING if fields.get("sliding_window") else FULL),) * n,
)
