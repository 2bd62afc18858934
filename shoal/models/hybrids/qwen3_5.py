"""Qwen3.5 (3.6 and 3.8 too), dense and with experts: Qwen3-Next, whose matrices for delta nets are apart."""

from __future__ import annotations

from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stored
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import LINEAR
from shoal.models.configs.recurrent import DELTA_DEFAULTS, delta_layer, linear_but_every
from shoal.models.gguf_names.hybrids import (
    DELTA_KEYS,
    DELTA_LAYERS,
    DELTA_TENSORS,
    SHARED_EXPERT_KEYS,
    SHARED_EXPERT_TENSORS,
    value_heads,
)
from shoal.models.hybrids.qwen3_next import EXPERTS, QUERY_AND_GATE, QUERY_KEY_VALUE, hybrid_layer, with_gates


def read_sparse(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    experts = ExpertsKind(
        fields.count("num_experts"),
        fields.count("moe_intermediate_size"),
        Router(fields.count("num_experts_per_tok"), renormalize=True),
        shared=SharedExpert(fields.count("shared_expert_intermediate_size"), gated=True),
    )
    return with_experts(with_gates(config, fields), fields, experts)


DEFAULTS = {
    **DELTA_DEFAULTS,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
TENSORS: dict[str, Stored] = {"self_attn.q_proj": QUERY_AND_GATE, "linear_attn.in_proj_qkv": QUERY_KEY_VALUE}
DENSE = Architecture(
    name="qwen3_5_text",
    hf_class="Qwen3_5ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    read=with_gates,
    layer_types=linear_but_every,
    other_layers={LINEAR: delta_layer},
    nested_in=("Qwen3_5ForConditionalGeneration",),
    also_named=("qwen3_5",),
    renamed={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
    tensors=TENSORS,
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "qwen35",
        tensors=DELTA_TENSORS,
        keys=DELTA_KEYS,
        derived=value_heads,
        layers=DELTA_LAYERS,
        moves_value_heads=True,
    ),
)
SPARSE = Architecture(
    name="qwen3_5_moe_text",
    hf_class="Qwen3_5MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # no layer has such an MLP
    },
    read=read_sparse,
    layer_types=linear_but_every,
    other_layers={LINEAR: delta_layer},
    nested_in=("Qwen3_5MoeForConditionalGeneration",),
    also_named=("qwen3_5_moe",),
    renamed={"num_local_experts": "num_experts", "mtp_num_hidden_layers": "num_nextn_predict_layers"},
    tensors={**TENSORS, **EXPERTS},
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "qwen35moe",
        tensors={**DELTA_TENSORS, **SHARED_EXPERT_TENSORS},
        keys={**DELTA_KEYS, **SHARED_EXPERT_KEYS},
        derived=value_heads,
        layers=DELTA_LAYERS,
        moves_value_heads=True,
    ),
)
