"""Qwen3-Next: gated delta nets in three of four layers; attention with a gate, whose matrix is part of
q's; mixtures of experts with a gated shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.kinds.attention import OutputGate
from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.kinds.recurrent import DeltaKind
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack, Stored
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

if TYPE_CHECKING:
    from torch import nn

Runs = tuple[int, tuple[int, ...]]


def with_gates(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Returns the config with what attention is in Qwen3-Next and in Qwen3.5."""
    if not fields.flag("attn_output_gate", True):
        raise CheckpointError(
            f"{fields.where}: attn_output_gate must be true for this architecture, got false"
        )
    bias = fields.flag("attention_bias")
    config = config.with_attention(gate=OutputGate("sigmoid"))
    return replace(config, norm="zero_centred", qk_norm=True, qkv_bias=bias, o_bias=bias)


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = with_gates(config, fields)
    num_experts = fields.count("num_experts", least=0)
    if not num_experts:
        return config
    experts = ExpertsKind(
        num_experts,
        fields.count("moe_intermediate_size"),
        Router(fields.count("num_experts_per_tok"), fields.flag("norm_topk_prob")),
        shared=SharedExpert(fields.count("shared_expert_intermediate_size"), gated=True),
    )
    return with_experts(config, fields, experts)


def hybrid_layer() -> type[nn.Module]:
    from shoal.models.decoder_layers.hybrid_layer import HybridLayer

    return HybridLayer


def _heads(config: ModelConfig) -> Runs:
    """Rows of q and of its gate, head by head."""
    return config.attention.num_heads, (1, 1)


def _delta(config: ModelConfig) -> DeltaKind:
    return next(kind.mixer for kind in config.layers if isinstance(kind.mixer, DeltaKind))


def _key_heads(config: ModelConfig) -> Runs:
    """Rows of q, k, v and z, key head by key head."""
    kind = _delta(config)
    values = kind.num_value_heads // kind.num_key_heads * kind.value_dim
    return kind.num_key_heads, (kind.key_dim, kind.key_dim, values, values)


def parts_of_qkv(config: ModelConfig) -> Runs:
    """Rows of q, k and v, one after the other."""
    return 1, _delta(config).part_sizes


QUERY_AND_GATE = Stack(("self_attn.q_proj", "self_attn.gate_proj"), runs=_heads)
QUERY_KEY_VALUE = Stack(tuple(f"linear_attn.in_proj_{part}" for part in "qkv"), runs=parts_of_qkv)
EXPERTS: dict[str, Stored] = {
    "mlp.shared_expert": "mlp.shared_experts",
    "mlp.experts.gate_up_proj": Stack(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
    "mlp.experts.down_proj": Stack(("mlp.experts.{}.down_proj",)),
}
ARCHITECTURE = Architecture(
    name="qwen3_next",
    hf_class="Qwen3NextForCausalLM",
    defaults={
        **DELTA_DEFAULTS,
        "intermediate_size": 5632,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    read=read,
    layer_types=linear_but_every,
    other_layers={LINEAR: delta_layer},
    renamed={"num_local_experts": "num_experts"},
    tensors={
        "self_attn.q_proj": QUERY_AND_GATE,
        "linear_attn.in_proj_qkvz": Stack(
            tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"), runs=_key_heads
        ),
        "linear_attn.in_proj_ba": Stack(
            tuple(f"linear_attn.in_proj_{part}" for part in "ba"),
            runs=lambda config: (_delta(config).num_key_heads, (1, 1)),
        ),
        "linear_attn.in_proj_qkv": QUERY_KEY_VALUE,  # in GGUF files
        **EXPERTS,
    },
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "qwen3next",
        tensors={
            **DELTA_TENSORS,
            **SHARED_EXPERT_TENSORS,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",  # in older files
        },
        keys={**DELTA_KEYS, **SHARED_EXPERT_KEYS},
        values={"norm_topk_prob": True},  # GGUF does not say it; the published models do
        derived=value_heads,
        layers=DELTA_LAYERS,
    ),
)
