"""gpt-oss: sinks, windows in every other layer, biases everywhere, and experts of clamped SwiGLU, whose
matrices are published in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import Activation, ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import full_every
from shoal.models.gguf_names.experts import EXPERT_TENSORS


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias", True)
    experts = ExpertsKind(
        fields.count("num_experts"),
        config.intermediate_size,
        Router(fields.count("num_experts_per_tok"), scores="chosen", bias=True),
        Activation("clamped_swiglu", fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
        biases=True,
    )
    config = replace(config.with_attention(sinks=True), qkv_bias=bias, o_bias=bias)
    return with_experts(config, fields, experts)


ARCHITECTURE = Architecture(
    name="gpt_oss",
    hf_class="GptOssForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    read=read,
    nested_in=("InternVLForConditionalGeneration",),
    layer_types=lambda fields, num_layers: full_every(2, num_layers),
    renamed={"num_local_experts": "num_experts"},
    tensors={
        "mlp.router": "mlp.gate",
        "mlp.experts.gate_up_proj": Stack(
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), interleaved=True, transposed=True
        ),
        "mlp.experts.down_proj": Stack(("mlp.experts.{}.down_proj",), transposed=True),
    },
    gguf=GGUFNames(
        "gpt-oss",
        tensors={
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            **EXPERT_TENSORS,
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        derived=lambda fields: {"rope_parameters": {**fields.get("rope_parameters"), "truncate": False}},
    ),
)
