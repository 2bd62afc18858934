"""Granite 4: Granite 3 with Mamba-2 in the place of attention in most layers or in none, with and without
experts, and without rope unless the config asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack, Stored
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, LINEAR
from shoal.models.configs.recurrent import granite_mamba_layer, parts_of_mamba
from shoal.models.families import granite
from shoal.models.gguf_names.hybrids import MAMBA_TENSORS, SHARED_EXPERT_TENSORS, per_head
from shoal.models.hybrids.qwen3_next import hybrid_layer
from shoal.models.mixtures import granite_moe


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = granite.read(config, fields)
    if fields.get("position_embedding_type") != "rope":
        config = config.with_attention(rope=None)
    shared, num_experts = fields.count("shared_intermediate_size"), fields.count("num_experts", least=0)
    if not num_experts:
        return replace(config, intermediate_size=shared)
    experts = ExpertsKind(
        num_experts,
        config.intermediate_size,
        Router(fields.count("num_experts_per_tok"), scores="chosen"),
        shared=SharedExpert(shared),
    )
    return with_experts(replace(config, architecture=SPARSE.name), fields, experts)


def derived(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields that a GGUF file says in other words."""
    has_rope = fields.flag("rope_finetuned", True)
    return {
        "position_embedding_type": "rope" if has_rope else "nope",
        "mamba_d_head": per_head(fields, "mamba_inner_size", "mamba_n_heads"),
        "mamba_expand": per_head(fields, "mamba_inner_size", "hidden_size"),
        "num_experts": fields.count("num_experts", 0, least=0),
    }


TENSORS: dict[str, Stored] = {
    "mamba.in_proj": Stack(
        tuple(f"mamba.in_proj_{part}" for part in ("z", "x", "b", "c", "dt")), runs=parts_of_mamba
    )
}
DENSE = Architecture(
    name="granitemoehybrid",
    hf_class="GraniteMoeHybridForCausalLM",
    defaults={
        **granite.ARCHITECTURE.defaults,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "intermediate_size": 11008,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    read=read,
    layer_types=lambda fields, num_layers: (LINEAR,) * num_layers,
    other_layers={LINEAR: granite_mamba_layer},
    renamed={"num_local_experts": "num_experts", "layers_block_type": "layer_types"},
    tensors={
        **TENSORS,
        "shared_mlp.input_linear": Stack(("mlp.gate_proj", "mlp.up_proj")),
        "shared_mlp.output_linear": "mlp.down_proj",
    },
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "granitehybrid",
        tensors={**MAMBA_TENSORS, **SHARED_EXPERT_TENSORS, "ssm_in": "mamba.in_proj"},
        keys={
            **granite.GGUF_KEYS,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
            "ssm.inner_size": "mamba_inner_size",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        derived=derived,
        others={"expert_count": "granitemoehybrid_experts"},
        without={"attention.scale": "bamba"},  # it has none of Granite's factors
        interleaved=True,
        layers={"ssm_in.weight": LINEAR, "attn_q.weight": FULL},
    ),
)
# The same class of checkpoints, whose tensors have other places in a layer with experts.
SPARSE = replace(
    DENSE, name="granitemoehybrid_experts", gguf=None, tensors={**TENSORS, **granite_moe.TENSORS}
)
