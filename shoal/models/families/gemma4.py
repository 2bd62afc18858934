"""Gemma 4: layers with a window and without differ in their heads, values are normed, and keys may be values.
The last layers may read earlier ones' keys and values, layers may have embeddings of their own, and experts
may run next to the MLP (Gemma4Layer). The unified class has neither of the last two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError
from shoal.kinds.experts import Activation, ExpertsKind, Router
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, attention_of, full_every
from shoal.models.families.gemma3 import refuse_both_ways
from shoal.models.gguf_names import gemma

if TYPE_CHECKING:
    from torch import nn


# parts of a layer in checkpoints that belong to the mixture of experts, and to the layer's own embeddings
BESIDE = (
    "router",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    refuse_both_ways(fields)
    bias = fields.flag("attention_bias")
    kinds = list(config.layers)
    if all(attention_of(kind).window is not None for kind in kinds):
        raise CheckpointError(
            f"{fields.where}: layer_types must have a full_attention layer, as the last one sees everything"
        )
    kinds[-1] = next(kind for kind in kinds if attention_of(kind).window is None)  # as transformers has it
    layers = [_heads(kind, fields, i) for i, kind in enumerate(kinds)]
    experts = None
    if fields.flag("enable_moe_block"):
        router = Router(fields.count("top_k_experts"), renormalize=True, expert_scale=True)
        size = fields.count("moe_intermediate_size")
        experts = ExpertsKind(fields.count("num_experts"), size, router, Activation("gelu_tanh"))
    per_layer_size = fields.count("hidden_size_per_layer_input", 0, least=0)
    per_layer_vocab_size = fields.count("vocab_size_per_layer_input")
    if per_layer_size and per_layer_vocab_size < config.vocab_size:
        raise CheckpointError(
            f"{fields.where}: vocab_size_per_layer_input must be at least vocab_size {config.vocab_size}, "
            f"got {per_layer_vocab_size}; each token has an embedding for each layer"
        )
    config = replace(
        config,
        layers=_shared(layers, config, fields),
        norm="float32",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=config.hidden_size**0.5,
        logits_softcap=fields.number_or_none("final_logit_softcapping"),
        per_layer_size=per_layer_size,
        per_layer_vocab_size=per_layer_vocab_size,
    )
    return with_experts(config, fields, experts)


def _heads(kind: LayerKind, fields: ConfigFields, layer: int) -> LayerKind:
    """The layer with its own heads: a config says them for each layer, or for all layers without a window."""
    mixer = kind.mixer
    assert isinstance(mixer, AttentionKind)
    is_full, key_is_value = mixer.window is None, fields.flag("attention_k_eq_v")
    own = fields.get("per_layer_config")
    if own is None:
        heads = fields.get("num_global_key_value_heads") if key_is_value else None
        own = {"head_dim": fields.get("global_head_dim"), "num_key_value_heads": heads} if is_full else {}
    elif isinstance(own, dict):
        own = own.get(str(layer), {})
    if not isinstance(own, dict):
        raise CheckpointError(
            f"{fields.where}: per_layer_config must be an object of objects, got {own!r:.80}"
        )
    given = ConfigFields(own, f"{fields.where}: layer {layer}")
    heads, head_dim = (
        given.count("num_key_value_heads", mixer.num_kv_heads),
        given.count("head_dim", mixer.head_dim),
    )
    if mixer.num_heads % heads or head_dim % 2:
        raise CheckpointError(
            f"{given.where}: num_key_value_heads must divide num_attention_heads {mixer.num_heads}, and "
            f"head_dim be even, got {heads} and {head_dim}"
        )
    return kind.with_attention(
        num_kv_heads=heads, head_dim=head_dim, scale=1.0, v_norm=True, v_is_k=is_full and key_is_value
    )


def _shared(layers: list[LayerKind], config: ModelConfig, fields: ConfigFields) -> tuple[LayerKind, ...]:
    """The last `num_kv_shared_layers` layers read the keys and values of the last layer of their type before
    them. Their MLPs may be twice as wide."""
    count = fields.count("num_kv_shared_layers", 0, least=0)
    first = len(layers) - count
    sources = {attention_of(layers[i]).window: i for i in range(max(first, 0))}
    wide = 2 * config.intermediate_size if fields.flag("use_double_wide_mlp") else None
    for i in range(max(first, 0), len(layers)):
        source = sources.get(attention_of(layers[i]).window)
        if source is None:
            raise CheckpointError(
                f"{fields.where}: num_kv_shared_layers must leave a layer of each type before them, got "
                f"{count}"
            )
        own = layers[i].with_attention(kv_layer=source, v_is_k=False)
        layers[i] = replace(own, intermediate_size=wide)
    return tuple(layers)


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    return (*full_every(6, num_layers)[:-1], FULL)


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.gemma4_layer import Gemma4Layer

    return Gemma4Layer


ARCHITECTURE = Architecture(
    name="gemma4_text",
    hf_class="Gemma4ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "partial_rotary_factor": 1.0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    },
    read=read,
    layer_types=layer_types,
    nested_in=("Gemma4ForConditionalGeneration",),
    tensors={
        "experts.gate_up_proj": Stack(("beside.experts.{}.gate_proj", "beside.experts.{}.up_proj")),
        "experts.down_proj": Stack(("beside.experts.{}.down_proj",)),
        "experts.{}": "beside.experts.{}",  # quantized by llm-compressor and ModelOpt
        "moe.experts.{}": "beside.experts.{}",  # and with transformers' first names
        "moe.per_expert_scale": "beside.router.per_expert_scale",
        **{name: f"beside.{name}" for name in BESIDE},
        **{name: f"per_layer.{name}" for name in PER_LAYER},
    },
    layer_class=layer_class,
    gguf=gemma.GEMMA4,
)
UNIFIED = replace(
    ARCHITECTURE,
    name="gemma4_unified_text",
    hf_class="Gemma4UnifiedForCausalLM",
    defaults={
        **ARCHITECTURE.defaults,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    nested_in=("Gemma4UnifiedForConditionalGeneration",),
    gguf=None,  # its files say gemma4
)
