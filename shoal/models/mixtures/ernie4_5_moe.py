"""ERNIE 4.5 with experts: rotated pairs of neighbours, and a softmax router with a correction bias."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Row
from shoal.models.configs.experts import routed_experts, with_experts
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.gguf_names.experts import EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    check_fixed(fields, {"use_bias": False})  # its output head would have one, too
    router = Router(
        fields.count("moe_k"),
        renormalize=True,
        eps=fields.number("moe_norm_min"),
        float32=True,
        correction=True,
    )
    experts = routed_experts(fields, router, "moe_num_experts", "moe_num_shared_experts")
    first, last = fields.count("moe_layer_start_index", least=0), fields.get("moe_layer_end_index")
    last = config.num_layers - 1 if last in (None, -1) else fields.count("moe_layer_end_index", least=0)
    config = with_experts(config, fields, experts)
    layers = enumerate(config.layers)
    return replace(
        config,
        layers=tuple(kind if first <= i <= last else replace(kind, experts=None) for i, kind in layers),
    )


ARCHITECTURE = Architecture(
    name="ernie4_5_moe",
    hf_class="Ernie4_5_MoeForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
    },
    read=read,
    renamed={"moe_layer_interval": "decoder_sparse_step"},
    tensors={
        "mlp.moe_statics.e_score_correction_bias": Row("mlp.gate.e_score_correction_bias"),
        # a trainer's
        "mlp.gate.moe_statics.e_score_correction_bias": Row("mlp.gate.e_score_correction_bias"),
    },
    interleaved=True,
    gguf=GGUFNames(
        "ernie4_5-moe",
        tensors={**EXPERT_TENSORS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "decoder_sparse_step",
        },
    ),
)
