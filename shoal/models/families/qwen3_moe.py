"""Qwen3-MoE: Qwen3 with mixtures of experts in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.config_fields import ConfigFields, sliding_window


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    num_experts = fields.count("num_experts", least=0)
    chosen = fields.count("num_experts_per_tok")
    if num_experts and chosen > num_experts:
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok {chosen} is more than num_experts {num_experts}"
        )
    size, router = fields.count("moe_intermediate_size"), Router(chosen, fields.flag("norm_topk_prob"))
    experts = ExpertsKind(num_experts, size, router) if num_experts else None
    sparse_step, dense = fields.count("decoder_sparse_step", 1), _mlp_only_layers(fields, config.num_layers)
    if fields.flag("use_sliding_window"):
        config = config.with_attention(window=sliding_window(fields))
    layers = tuple(
        replace(kind, experts=experts) if i not in dense and (i + 1) % sparse_step == 0 else kind
        for i, kind in enumerate(config.layers)
    )
    bias = fields.flag("attention_bias")
    return replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias, layers=layers)


def _mlp_only_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    layers = fields.get("mlp_only_layers") or []
    known = isinstance(layers, list) and len(layers) <= num_layers
    if not known or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"{fields.where}: mlp_only_layers must be layers from 0 to {num_layers - 1}, got {layers!r:.80}"
        )
    return tuple(layers)


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    read=read,
    renamed={"num_local_experts": "num_experts"},  # by transformers 5
    gguf=GGUFNames(
        "qwen3moe",
        tensors={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # GGUF does not say it; the published models do
        values={"norm_topk_prob": True},
    ),
)
