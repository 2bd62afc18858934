"""Gemma 2 and Gemma 3: norms before and after attention and MLP (SandwichLayer), GELU, embeddings times
sqrt(D), and layers with a window between those without. Gemma 2 caps scores and logits; Gemma 3 norms q and k
instead, and its layers with a window have a rope of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import full_every
from shoal.models.gguf_names.gemma import SANDWICH_TENSORS

if TYPE_CHECKING:
    from torch import nn


def refuse_both_ways(fields: ConfigFields) -> None:
    """Raises CheckpointError for models whose tokens see later ones."""
    sees = fields.get("use_bidirectional_attention")
    if sees not in (None, False, "vision"):
        raise CheckpointError(
            f"{fields.where}: use_bidirectional_attention {sees!r:.80} is not supported; only models whose "
            "text tokens see earlier ones are"
        )


def shared(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    refuse_both_ways(fields)
    bias = fields.flag("attention_bias")
    return replace(
        config.with_attention(scale=fields.number("query_pre_attn_scalar") ** -0.5),
        norm="zero_centred",
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=config.hidden_size**0.5,
        logits_softcap=fields.number_or_none("final_logit_softcapping"),
    )


def read_gemma2(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return shared(config, fields).with_attention(softcap=fields.number_or_none("attn_logit_softcapping"))


def read_gemma3(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = replace(shared(config, fields), qk_norm=True)
    # transformers' class with a vision tower does not cap
    return replace(config, logits_softcap=None) if fields.get("text_config") else config


def gemma3_layers(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    return full_every(fields.count("sliding_window_pattern"), num_layers)


def score_scale(largest: int, fields: ConfigFields) -> Mapping[str, Any]:
    """A GGUF file does not say how scores are scaled. llama.cpp knows the largest model by its number of
    layers: there it is the width of a head as if heads shared the hidden size."""
    head_dim, layers = fields.count("head_dim"), fields.count("num_hidden_layers")
    shared_size = fields.count("hidden_size") // fields.count("num_attention_heads")
    return {"query_pre_attn_scalar": shared_size if layers == largest else head_dim}


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.sandwich_layer import SandwichLayer

    return SandwichLayer


DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
GEMMA2 = Architecture(
    name="gemma2",
    hf_class="Gemma2ForCausalLM",
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    read=read_gemma2,
    layer_types=lambda fields, num_layers: full_every(2, num_layers),
    layer_class=layer_class,
    gguf=GGUFNames(
        "gemma2",
        tensors=SANDWICH_TENSORS,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        derived=lambda fields: score_scale(46, fields),
    ),
)
GEMMA3 = Architecture(
    name="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    # The text model within the multimodal class names only the fields in which it differs from these.
    defaults={
        **DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    read=read_gemma3,
    layer_types=gemma3_layers,
    sliding_rope=lambda fields: {"rope_theta": fields.number("rope_local_base_freq")},
    nested_in=("Gemma3ForConditionalGeneration",),
    layer_class=layer_class,
    gguf=GGUFNames(
        "gemma3",
        tensors=SANDWICH_TENSORS,
        keys={
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        derived=lambda fields: score_scale(62, fields),
    ),
)
