"""Llama 4, text: layers with rope see their chunk of positions, the others see all and scale their
queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError
from shoal.kinds.attention import QueryScaling
from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.experts import DENSE, SPARSE, with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import CHUNKED, FULL
from shoal.models.families.smollm3 import rotated
from shoal.models.gguf_names.experts import EXPERT_TENSORS

if TYPE_CHECKING:
    from torch import nn


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    has_chunks = fields.get("attention_chunk_size") is not None
    return tuple(CHUNKED if has_chunks and has_rope else FULL for has_rope in rotated(fields, num_layers))


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    scaling = None
    if fields.get("attn_temperature_tuning"):
        scaling = QueryScaling(fields.number("attn_scale"), fields.count("floor_scale"), offset=1)
    flags = rotated(fields, config.num_layers)
    layers = tuple(
        kind.with_attention(qk_rms=fields.flag("use_qk_norm"))
        if has_rope
        else kind.with_attention(rope=None, query_scaling=scaling)
        for kind, has_rope in zip(config.layers, flags)
    )
    bias, size = fields.flag("attention_bias"), config.intermediate_size
    config = replace(
        config,
        intermediate_size=fields.count("intermediate_size_mlp"),
        layers=layers,
        qkv_bias=bias,
        o_bias=bias,
    )
    router = Router(fields.count("num_experts_per_tok"), scores="chosen")
    experts = ExpertsKind(fields.count("num_experts"), size, router, shared=SharedExpert(size))
    return with_experts(config, sparse_layers(fields, config.num_layers), experts)


def sparse_layers(fields: ConfigFields, num_layers: int) -> ConfigFields:
    """The layers with experts, in the words of other configs."""
    step, listed = fields.count("interleave_moe_layer_step"), fields.get("moe_layers")
    if listed is None:
        listed = range(step - 1, num_layers, step)
    elif not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise CheckpointError(f"{fields.where}: moe_layers must be a list of layers, got {listed!r:.80}")
    kinds = [SPARSE if i in listed else DENSE for i in range(num_layers)]
    return ConfigFields({**fields.values, "mlp_layer_types": kinds}, fields.where)


def _gguf_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields that no metadata says. llama.cpp takes them from the number of experts, which tells Scout from
    Maverick."""
    if fields.get("sliding_window") == 0:
        raise CheckpointError(
            f"{fields.where}: attention.sliding_window must be left out for this architecture, got 0; models "
            "without chunks of positions are not supported"
        )
    return {"use_qk_norm": fields.count("num_experts") != 128}


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.llama4_layer import Llama4Layer

    return Llama4Layer


ARCHITECTURE = Architecture(
    name="llama4_text",
    hf_class="Llama4ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "eos_token_id": 2,
        "intermediate_size_mlp": 16384,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    read=read,
    layer_types=layer_types,
    known_layer_types=(FULL, CHUNKED),
    nested_in=("Llama4ForConditionalGeneration",),
    renamed={"num_local_experts": "num_experts"},
    tensors={
        "feed_forward.router": "mlp.gate",
        "feed_forward.shared_expert": "mlp.shared_experts",
        "feed_forward.experts.gate_up_proj": Stack(
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), transposed=True
        ),
        "feed_forward.experts.down_proj": Stack(("mlp.experts.{}.down_proj",), transposed=True),
        "feed_forward.experts.{}": "mlp.experts.{}",  # quantized by llm-compressor
        "feed_forward.gate_proj": "mlp.gate_proj",
        "feed_forward.up_proj": "mlp.up_proj",
        "feed_forward.down_proj": "mlp.down_proj",
    },
    interleaved=True,
    gguf=GGUFNames(
        "llama4",
        tensors=EXPERT_TENSORS,
        keys={
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        derived=_gguf_fields,
    ),
    layer_class=layer_class,
)
