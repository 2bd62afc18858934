"""OLMoE: norms of all heads of q and of k, and experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    if fields.get("clip_qkv") is not None:
        raise CheckpointError(f"{fields.where}: clip_qkv must be null, got {fields.get('clip_qkv')!r:.80}")
    router = Router(fields.count("num_experts_per_tok"), fields.flag("norm_topk_prob"))
    experts = ExpertsKind(fields.count("num_experts"), config.intermediate_size, router)
    bias = fields.flag("attention_bias")
    return with_experts(replace(config, qkv_bias=bias, o_bias=bias), fields, experts)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.width_norm_layer import WidthNormLayer

    return WidthNormLayer


ARCHITECTURE = Architecture(
    name="olmoe",
    hf_class="OlmoeForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    read=read,
    renamed={"num_local_experts": "num_experts"},
    layer_class=layer_class,
)
