"""Arcee's Trinity (AFMoE): sandwiches of norms, gated attention with windows in three of four layers and
without rope in the others, and a sigmoid router with a correction bias after dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.kinds.attention import OutputGate
from shoal.kinds.experts import Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import routed_experts, with_experts
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.configs.layers import full_every, rotating_in_windows
from shoal.models.gguf_names.experts import EXPERT_TENSORS

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    check_fixed(fields, {"score_func": "sigmoid", "route_norm": True})
    router = Router(
        fields.count("num_experts_per_tok"),
        renormalize=True,
        scores="sigmoid",
        eps=1e-20,
        scale=fields.number("route_scale"),
        correction=True,
    )
    experts = routed_experts(fields, router, "num_experts", "num_shared_experts")
    config = rotating_in_windows(config.with_attention(gate=OutputGate("sigmoid")))
    bias, scale = fields.flag("attention_bias"), config.hidden_size**0.5 if fields.flag("mup_enabled") else 1
    config = replace(
        config, norm="float32", qk_norm=True, qkv_bias=bias, o_bias=bias, embedding_multiplier=scale
    )
    return with_experts(config, fields, experts)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.gated_sandwich_layer import GatedSandwichLayer

    return GatedSandwichLayer


ARCHITECTURE = Architecture(
    name="afmoe",
    hf_class="AfmoeForCausalLM",
    defaults={
        "max_position_embeddings": 16384,
        "num_key_value_heads": None,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "first_k_dense_replace": 1,
    },
    read=read,
    layer_types=lambda fields, n: full_every(fields.count("global_attn_every_n_layers"), n),
    renamed={"num_local_experts": "num_experts", "num_dense_layers": "first_k_dense_replace"},
    tensors={
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    layer_class=layer_class,
    gguf=GGUFNames(
        "afmoe",
        tensors={
            **EXPERT_TENSORS,
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "attn_gate": "self_attn.gate_proj",
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        values={"mup_enabled": True},  # GGUF does not say it; llama.cpp computes so
    ),
)
