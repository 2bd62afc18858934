"""K-EXAONE: Llama's layer with a norm of each head of q and k, windows as in EXAONE 4, and DeepSeek V3's
router."""

from __future__ import annotations

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import exaone4
from shoal.models.gguf_names.experts import EXPERT_KEYS, EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    experts = routed_experts(fields, sigmoid_router(fields))
    return with_experts(exaone4.read(config, fields), fields, experts)


ARCHITECTURE = Architecture(
    name="exaone_moe",
    hf_class="ExaoneMoeForCausalLM",
    defaults={
        **exaone4.ARCHITECTURE.defaults,
        "eos_token_id": 53,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    read=read,
    layer_types=exaone4.layer_types,
    nested_in=("ExaoneMoEForCausalLM",),  # its first spelling
    renamed={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    },
    tensors={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    gguf=GGUFNames("exaone-moe", tensors=EXPERT_TENSORS, keys=EXPERT_KEYS),
)
