"""MiniMax M2: norms of all heads of q and of k, a part of each head rotated, and a sigmoid router with a
correction bias."""

from __future__ import annotations

from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.gguf_names.experts import EXPERT_TENSORS
from shoal.models.mixtures import mixtral, olmoe


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = Router(fields.count("num_experts_per_tok"), renormalize=True, scores="sigmoid", correction=True)
    experts = ExpertsKind(fields.count("num_experts"), config.intermediate_size, router)
    return with_experts(config, fields, experts)


ARCHITECTURE = Architecture(
    name="minimax_m2",
    hf_class="MiniMaxM2ForCausalLM",
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000.0,
        "partial_rotary_factor": 1.0,
        "eos_token_id": 200020,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    read=read,
    renamed={"num_local_experts": "num_experts"},
    tensors={
        **mixtral.TENSORS,
        "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",  # a trainer's
    },
    gguf=GGUFNames(
        "minimax-m2",
        tensors=EXPERT_TENSORS,
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
    layer_class=olmoe.layer_class,
)
