"""LFM2 and LFM2.5, dense and with experts: short convolutions and attention."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router
from shoal.kinds.recurrent import ShortConvKind
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack, Stored
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL
from shoal.models.gguf_names.experts import EXPERT_TENSORS
from shoal.models.hybrids.qwen3_next import hybrid_layer

CONV = "conv"


def conv_layer(fields: ConfigFields) -> LayerKind:
    width, bias = fields.count("conv_L_cache", least=2), fields.flag("conv_bias")
    return LayerKind(ShortConvKind(fields.count("hidden_size"), width, bias))


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    given = fields.get("full_attn_idxs")
    if given is None:
        return (FULL,) * num_layers
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < num_layers for i in given):
        raise CheckpointError(
            f"{fields.where}: full_attn_idxs must be layers from 0 to {num_layers - 1}, got {given!r:.80}"
        )
    return tuple(FULL if i in given else CONV for i in range(num_layers))


def read_shared(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Returns the config with what both architectures have."""
    tied = fields.flag("tie_embedding", config.tie_word_embeddings)
    eps = fields.number("norm_eps")
    return replace(config, qk_norm=True, tie_word_embeddings=tied, rms_norm_eps=eps)


def read_dense(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    size = fields.count("block_ff_dim", config.intermediate_size)
    if fields.flag("block_auto_adjust_ff_dim"):
        multiple = fields.count("block_multiple_of")
        size = int(fields.number("block_ffn_dim_multiplier") * (2 * size // 3))
        size = -(-size // multiple) * multiple
    return replace(read_shared(config, fields), intermediate_size=size)


def read_sparse(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    router = Router(
        fields.count("num_experts_per_tok"),
        fields.flag("norm_topk_prob"),
        scores="sigmoid",
        eps=1e-6,
        scale=fields.number("routed_scaling_factor"),
        correction=fields.flag("use_expert_bias"),
    )
    experts = ExpertsKind(fields.count("num_experts"), fields.count("moe_intermediate_size"), router)
    return with_experts(read_shared(config, fields), fields, experts)


DEFAULTS = {
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
TENSORS: dict[str, Stored] = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "conv.in_proj": Stack(("conv.in_proj_b", "conv.in_proj_c", "conv.in_proj_x")),
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
GGUF_TENSORS = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
GGUF_KEYS = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
GGUF_LAYERS = {"shortconv.conv.weight": CONV, "attn_q.weight": FULL}
DENSE = Architecture(
    name="lfm2",
    hf_class="Lfm2ForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    read=read_dense,
    layer_types=layer_types,
    other_layers={CONV: conv_layer},
    tensors=TENSORS,
    layer_class=hybrid_layer,
    nested_in=("Lfm2VlForConditionalGeneration",),
    gguf=GGUFNames(
        "lfm2",
        tensors=GGUF_TENSORS,
        keys=GGUF_KEYS,
        values={"block_auto_adjust_ff_dim": False},
        layers=GGUF_LAYERS,
    ),
)
SPARSE = Architecture(
    name="lfm2_moe",
    hf_class="Lfm2MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "first_k_dense_replace": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    read=read_sparse,
    layer_types=layer_types,
    other_layers={CONV: conv_layer},
    renamed={"num_dense_layers": "first_k_dense_replace", "num_local_experts": "num_experts"},
    tensors={
        **TENSORS,
        "feed_forward.gate": "mlp.gate",
        "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
        "feed_forward.experts.{}.w1": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.{}.w3": "mlp.experts.{}.up_proj",
        "feed_forward.experts.{}.w2": "mlp.experts.{}.down_proj",
        "feed_forward.experts": "mlp.experts",  # a trainer's
    },
    layer_class=hybrid_layer,
    gguf=GGUFNames(
        "lfm2moe",
        tensors={**GGUF_TENSORS, **EXPERT_TENSORS},
        keys={
            **GGUF_KEYS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        layers=GGUF_LAYERS,
    ),
)
