"""Mistral Small 4: latent attention whose queries grow with the position, and experts whose router is a
softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.latent import with_latents
from shoal.models.gguf_names.experts import LATENT_KEYS, LATENT_TENSORS, latents


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = replace(sigmoid_router(fields), scores="softmax", correction=False, float32=False)
    return with_experts(with_latents(config, fields), fields, routed_experts(fields, router))


def _gguf_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Queries of files without a temperature do not grow, as in llama.cpp."""
    given = latents(fields)
    beta = fields.get("temperature_scale")
    return {**given, "rope_parameters": {**given["rope_parameters"], "llama_4_scaling_beta": beta}}


ARCHITECTURE = Architecture(
    name="mistral4",
    hf_class="Mistral4ForCausalLM",
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "eos_token_id": 2,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    read=read,
    nested_in=("Mistral3ForConditionalGeneration",),
    tensors={
        "mlp.experts.gate_up_proj": Stack(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
        "mlp.experts.down_proj": Stack(("mlp.experts.{}.down_proj",)),
    },
    gguf=GGUFNames(
        "mistral4",
        tensors=LATENT_TENSORS,
        keys={**LATENT_KEYS, "attention.temperature_scale": "temperature_scale"},
        derived=_gguf_fields,
    ),
)
