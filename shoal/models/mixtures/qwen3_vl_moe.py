"""The text model of Qwen3-VL with experts: Qwen3-MoE with the experts of a layer in one tensor, which is
transposed as it is published, and not as transformers 5 writes it."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.checkpoint_names import Stack
from shoal.models.mixtures import qwen3_moe


def _intermediate_size(config: ModelConfig) -> int:
    assert config.experts is not None
    return config.experts.intermediate_size


ARCHITECTURE = replace(
    qwen3_moe.ARCHITECTURE,
    name="qwen3_vl_moe_text",
    hf_class="Qwen3VLMoeForConditionalGeneration",
    defaults={
        "max_position_embeddings": 128000,
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "tie_word_embeddings": True,
    },
    said_otherwise=lambda fields: {"norm_topk_prob": True},  # transformers reads no such field
    tensors={
        "mlp.experts.gate_up_proj": Stack(
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            transposed=True,
            inputs=lambda config: config.hidden_size,
        ),
        "mlp.experts.down_proj": Stack(
            ("mlp.experts.{}.down_proj",), transposed=True, inputs=_intermediate_size
        ),
    },
    gguf=None,
)
