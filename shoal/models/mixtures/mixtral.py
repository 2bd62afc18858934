"""Mixtral: Mistral with experts in all layers."""

from __future__ import annotations

from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields, sliding_window

TENSORS = {
    "block_sparse_moe.gate": "mlp.gate",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate_proj",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up_proj",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down_proj",
}


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = Router(fields.count("num_experts_per_tok"), renormalize=True)
    experts = ExpertsKind(fields.count("num_experts"), config.intermediate_size, router)
    return with_experts(config.with_attention(window=sliding_window(fields)), fields, experts)


ARCHITECTURE = Architecture(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    read=read,
    renamed={"num_local_experts": "num_experts"},
    tensors=TENSORS,
)
