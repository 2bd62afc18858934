"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without rope in the others, and
after the first layers mixtures of experts as in DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.recurrent import ChannelDeltaKind
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.experts import routed_experts, sigmoid_router, with_experts
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.configs.latent import with_latents
from shoal.models.configs.layers import FULL, LINEAR
from shoal.models.gguf_names.experts import LATENT_KEYS, LATENT_TENSORS, SIGMOID, latents
from shoal.models.gguf_names.hybrids import CHANNEL_DELTA_TENSORS
from shoal.models.hybrids.qwen3_next import hybrid_layer

# fields that models of this class have with one value alone
FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
# a key of linear_attn_config -> its name in newer configs
LINEAR_FIELDS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def linear_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """The fields of `linear_attn_config`, in which layers count from 1."""
    given = fields.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{fields.where}: linear_attn_config must be an object, got {given!r:.80}")
    found = {name: given[key] for key, name in LINEAR_FIELDS.items() if key in given}
    full, num_layers = given.get("full_attn_layers"), fields.count("num_hidden_layers")
    if fields.get("layer_types") is None and full is not None:
        if not isinstance(full, list) or not all(type(i) is int and 1 <= i <= num_layers for i in full):
            raise CheckpointError(
                f"{fields.where}: full_attn_layers must be layers from 1 to {num_layers}, got {full!r:.80}"
            )
        found["layer_types"] = [FULL if i + 1 in full else LINEAR for i in range(num_layers)]
    return found


def delta_layer(fields: ConfigFields) -> LayerKind:
    heads, size = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    width = fields.count("linear_conv_kernel_dim", least=2)
    return LayerKind(ChannelDeltaKind(heads, heads, size, size, width, gate_rank=size))


def from_gguf(fields: ConfigFields) -> Mapping[str, Any]:
    """The fields of a GGUF file that it says in other words. Heads of both kinds of layers are as many.
    Weights of experts are always divided by their sum: llama.cpp's converter writes no key for it."""
    check_fixed(fields, {"expert_gating_func": SIGMOID})
    heads = fields.count("num_attention_heads")
    return {**latents(fields), "linear_num_heads": heads, "norm_topk_prob": True}


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    check_fixed(fields, FIXED)
    config = with_latents(config.with_attention(rope=None), fields)
    return with_experts(config, fields, routed_experts(fields, sigmoid_router(fields)))


ARCHITECTURE = Architecture(
    name="kimi_linear",
    hf_class="KimiLinearForCausalLM",
    defaults={
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 163586,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    read=read,
    layer_types=lambda fields, num_layers: tuple(
        FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)
    ),
    other_layers={LINEAR: delta_layer},
    said_otherwise=linear_fields,
    renamed={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    tensors={
        "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate_proj",
        "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up_proj",
        "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down_proj",
        "mlp.experts.{}.w1": "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.w3": "mlp.experts.{}.up_proj",
        "mlp.experts.{}.w2": "mlp.experts.{}.down_proj",
        "block_sparse_moe": "mlp",
        # a trainer's
        "self_attn.conv1d": Stack(tuple(f"self_attn.{part}_conv1d" for part in "qkv")),
        "self_attn.forget_gate": "self_attn",
    },
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "kimi-linear",
        tensors={**LATENT_TENSORS, **CHANNEL_DELTA_TENSORS},
        keys={**LATENT_KEYS, "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"},
        derived=from_gguf,
        layers={"ssm_conv1d_q.weight": LINEAR, "attn_kv_a_mqa.weight": FULL},
    ),
)
