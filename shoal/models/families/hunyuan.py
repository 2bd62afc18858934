"""Hunyuan, dense: Llama with norms of each head of q and k after the rotation (HunyuanLayer)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.hunyuan_layer import HunyuanLayer

    return HunyuanLayer


ARCHITECTURE = Architecture(
    name="hunyuan_v1_dense",
    hf_class="HunYuanDenseV1ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    read=read,
    tensors={"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"},
    gguf=GGUFNames("hunyuan-dense"),
    layer_class=layer_class,
)
