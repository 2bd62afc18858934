"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without rope, an MLP or a mixture of experts.
MLPs and experts have no gates; experts may compute in a latent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.experts import Activation, ExpertsKind, SharedExpert
from shoal.kinds.recurrent import Mamba2Kind
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack, Stored
from shoal.models.configs.experts import check_experts, sigmoid_router
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, LINEAR
from shoal.models.configs.recurrent import groups_of, parts_of_mamba, state_dtype, time_step_limit
from shoal.models.gguf_names.experts import EXPERT_KEYS, EXPERT_TENSORS
from shoal.models.gguf_names.hybrids import MAMBA_TENSORS, per_head
from shoal.models.hybrids.qwen3_next import hybrid_layer

MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}


def given_layers(fields: ConfigFields) -> Mapping[str, Any]:
    """The layer types of a pattern of letters, and how many layers they are."""
    kinds, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if pattern is not None and kinds is None:
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS) or not pattern:
            raise CheckpointError(
                f"{fields.where}: hybrid_override_pattern must be letters of {' '.join(LETTERS)}, got "
                f"{pattern!r:.80}"
            )
        kinds = [LETTERS[letter] for letter in pattern]
    kinds = fields.get("layer_types") if kinds is None else kinds
    if kinds is None:
        kinds = [LINEAR, EXPERTS, FULL, MLP]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds) if isinstance(kinds, list) else None}


def mamba_layer(fields: ConfigFields) -> LayerKind:
    heads = fields.count("mamba_num_heads")
    kind = Mamba2Kind(
        heads,
        fields.count("mamba_head_dim"),
        groups_of(fields, "n_groups", heads),
        fields.count("ssm_state_size"),
        fields.count("conv_kernel", least=2),
        fields.flag("use_conv_bias"),
        fields.flag("use_bias"),
        *time_step_limit(fields),
        dtype=state_dtype(fields, "mamba_ssm_cache_dtype"),
    )
    return LayerKind(kind, has_mlp=False)


def experts_layer(fields: ConfigFields) -> LayerKind:
    latent = fields.get("moe_latent_size")
    experts = ExpertsKind(
        fields.count("n_routed_experts"),
        fields.count("moe_intermediate_size"),
        sigmoid_router(fields),
        Activation("relu2"),
        shared=SharedExpert(fields.count("moe_shared_expert_intermediate_size")),
        latent_size=None if latent is None else fields.count("moe_latent_size"),
    )
    check_experts(experts, fields)
    return LayerKind(None, experts=experts)


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    for key, expected in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if (given := fields.get(key)) != expected:
            raise CheckpointError(f"{fields.where}: {key} must be {expected}, got {given!r:.80}")
    for key in ("mlp_bias", "residual_in_fp32"):
        if fields.flag(key):
            raise CheckpointError(f"{fields.where}: {key} must be false for this architecture, got true")
    layers = (
        kind if kind.attention is None else replace(kind.with_attention(rope=None), has_mlp=False)
        for kind in config.layers
    )
    bias = fields.flag("attention_bias")
    return replace(
        config,
        activation="relu2",
        norm="float32",
        qkv_bias=bias,
        o_bias=bias,
        rms_norm_eps=fields.number("layer_norm_epsilon"),
        layers=tuple(layers),
    )


def derived(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields that a GGUF file says in other words."""
    return {"mamba_head_dim": per_head(fields, "mamba_inner_size", "mamba_num_heads")}


TENSORS: dict[str, Stored] = {
    "norm": "input_layernorm",
    "mixer.in_proj": Stack(
        tuple(f"mamba.in_proj_{part}" for part in ("z", "x", "b", "c", "dt")), runs=parts_of_mamba
    ),
    **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")},
    **{f"mixer.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    "mixer.experts.up_proj": Stack(("mlp.experts.{}.up_proj",)),
    "mixer.experts.down_proj": Stack(("mlp.experts.{}.down_proj",)),
    "mixer": "mlp",
}
ARCHITECTURE = Architecture(
    name="nemotron_h",
    hf_class="NemotronHForCausalLM",
    defaults={
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "eos_token_id": 2,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    read=read,
    layer_types=lambda fields, num_layers: (),
    other_layers={LINEAR: mamba_layer, EXPERTS: experts_layer, MLP: lambda fields: LayerKind(None)},
    said_otherwise=given_layers,
    renamed={
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    },
    tensors=TENSORS,
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "nemotron_h",
        tensors={
            **MAMBA_TENSORS,
            **EXPERT_TENSORS,
            "ssm_in": "mixer.in_proj",
            "post_attention_norm": "post_attention_layernorm",  # in a draft head's block alone
            "ffn_latent_down": "mlp.fc1_latent_proj",
            "ffn_latent_up": "mlp.fc2_latent_proj",
        },
        keys={
            **EXPERT_KEYS,
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
            "ssm.inner_size": "mamba_inner_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "moe_latent_size": "moe_latent_size",
        },
        derived=derived,
        interleaved=True,
        also_named=("nemotron_h_moe",),
        layers={
            "ssm_in.weight": LINEAR,
            "attn_q.weight": FULL,
            "ffn_gate_inp.weight": EXPERTS,
            "ffn_up.weight": MLP,
        },
    ),
)
