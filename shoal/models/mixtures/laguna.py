"""Laguna: layers that differ in heads, windows and ropes, gates after attention, and a sigmoid router with a
shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.attention import OutputGate
from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.gguf_names.experts import EXPERT_TENSORS

# gating of a config -> whether a gate is one number for a head
PER_HEAD = {True: True, "per-head": True, "per_head": True, "per-element": False, "per_element": False}


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    if fields.flag("moe_apply_router_weight_on_input"):
        raise CheckpointError(
            f"{fields.where}: moe_apply_router_weight_on_input must be false, got true; weights of experts "
            "multiply their outputs here"
        )
    softcap = fields.get("moe_router_logit_softcapping")
    router = Router(
        fields.count("num_experts_per_tok"),
        renormalize=True,
        scores="sigmoid",
        scale=fields.number("moe_routed_scaling_factor"),
        softcap=fields.number("moe_router_logit_softcapping") if softcap else None,
        correction=True,
    )
    experts = ExpertsKind(
        fields.count("num_experts"),
        fields.count("moe_intermediate_size"),
        router,
        shared=SharedExpert(fields.count("shared_expert_intermediate_size")),
    )
    bias, num_layers = fields.flag("attention_bias"), config.num_layers
    layers = tuple(
        kind.with_attention(num_heads=heads, gate=OutputGate("softplus", per_head, "g_proj"))
        for kind, heads, per_head in zip(
            config.layers, _heads(config, fields), _gated_by_head(fields, num_layers)
        )
    )
    config = replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias, layers=layers)
    return with_experts(config, fields, experts)


def _heads(config: ModelConfig, fields: ConfigFields) -> list[int]:
    """The query heads of each layer."""
    key, shared = "num_attention_heads_per_layer", config.attention.num_kv_heads
    if fields.get(key) is None:
        return [config.attention.num_heads] * config.num_layers
    heads = [
        each.count("num_attention_heads")
        for each in fields.each(key, config.num_layers, "num_attention_heads")
    ]
    if any(count % shared for count in heads):
        raise CheckpointError(
            f"{fields.where}: {key} must be multiples of num_key_value_heads {shared}, got {heads}"
        )
    return heads


def _gated_by_head(fields: ConfigFields, num_layers: int) -> list[bool]:
    given = [fields.get("gating")] * num_layers
    if fields.get("gating_types") is not None:
        given = [each.get("gating") for each in fields.each("gating_types", num_layers, "gating")]
    if not all(isinstance(gate, bool | str) and gate in PER_HEAD for gate in given):
        raise CheckpointError(
            f"{fields.where}: gating must be true, per-head or per-element, got {given[0]!r:.80}"
        )
    return [PER_HEAD[gate] for gate in given]


def _sliding_rope(fields: ConfigFields) -> Mapping[str, Any]:
    """The rope of layers with a window in configs that also have one for full layers."""
    return {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **(fields.get("swa_rope_parameters") or {})}


def _gguf_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields of config.json that a file says layer by layer, or in other words. The file's rope is for
    layers without a window: each fourth one, from the first, unless a flag of each layer says more."""
    num_layers = fields.count("num_hidden_layers")
    heads = [fields.get("num_attention_heads")] * num_layers
    if isinstance(heads[0], list):
        given = fields.each("num_attention_heads", num_layers)
        heads = [each.count("num_attention_heads") for each in given]
    slides = fields.get("sliding_window")
    types = [
        SLIDING if slides and i % fields.count("sliding_window_pattern", 4) else FULL
        for i in range(num_layers)
    ]
    head_dim, rope = fields.count("head_dim"), fields.get("rope_parameters")
    sliding = {
        "rope_theta": fields.get("sliding_theta") or rope["rope_theta"],
        "partial_rotary_factor": fields.count("sliding_rotary_dim", head_dim) / head_dim,
    }
    return {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "layer_types": fields.get("layer_types") or types,
        "gating_types": [
            "per-head" if rows == own else "per-element" for rows, own in zip(fields.get("gate_rows"), heads)
        ],
        "rope_parameters": {
            FULL: {**rope, "partial_rotary_factor": fields.number("partial_rotary_factor", 1.0)},
            SLIDING: sliding,
        },
    }


ARCHITECTURE = Architecture(
    name="laguna",
    hf_class="LagunaForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        "gating": True,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "moe_routed_scaling_factor": 1.0,
    },
    read=read,
    layer_types=lambda fields, num_layers: (FULL,) * num_layers,
    sliding_rope=_sliding_rope,
    renamed={"num_local_experts": "num_experts"},
    tensors={
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    },
    gguf=GGUFNames(
        "laguna",
        tensors={**EXPERT_TENSORS, "attn_gate": "self_attn.g_proj"},
        keys={
            "rope.freq_base_swa": "sliding_theta",
            "rope.dimension_count_swa": "sliding_rotary_dim",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_scale": "moe_routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        values={"mlp_only_layers": []},
        derived=_gguf_fields,
        by_layer=("num_attention_heads",),
    ),
)
