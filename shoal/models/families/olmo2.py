"""OLMo 2: norms follow attention and MLP, before the sum with the residual, and q and k are normed over
all their heads together (Olmo2Layer)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias)


def whole_factor(fields: ConfigFields) -> dict[str, Any]:
    """The rope of a GGUF file. Its converter writes the model's whole factor, and not one that multiplies
    yarn's own."""
    rope = dict(fields.get("rope_parameters"))
    if rope.get("rope_type") == "yarn" and fields.get("attn_factor") is not None:
        rope["attention_factor"] = fields.number("attn_factor")
    return {"rope_parameters": rope}


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.olmo2_layer import Olmo2Layer

    return Olmo2Layer


ARCHITECTURE = Architecture(
    name="olmo2",
    hf_class="Olmo2ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    read=read,
    gguf=GGUFNames(
        "olmo2",
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys={"rope.scaling.attn_factor": "attn_factor"},
        derived=whole_factor,
        others={"attention.sliding_window": "olmo3"},
    ),
    layer_class=layer_class,
)
