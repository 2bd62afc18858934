"""Hunyuan-A13B: Hunyuan's layer with experts and a shared MLP of an expert's size in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import hunyuan
from shoal.models.gguf_names.experts import EXPERT_TENSORS

BY_LAYER = ("num_experts", "moe_topk")


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    experts = ExpertsKind(
        fields.count("num_experts"),
        config.intermediate_size,
        Router(fields.count("moe_topk"), renormalize=True, float32=True),
        shared=SharedExpert(config.intermediate_size),
    )
    return with_experts(hunyuan.read(config, fields), fields, experts)


def _of_all_layers(fields: ConfigFields) -> Mapping[str, Any]:
    """Numbers that published configs have for each layer."""
    given: dict[str, Any] = {}
    for key in BY_LAYER:
        values = fields.get(key)
        if isinstance(values, list):
            if not values or any(value != values[0] for value in values):
                raise CheckpointError(
                    f"{fields.where}: {key} must be the same for all layers, got {values!r:.80}; layers with "
                    "different numbers of experts are not supported"
                )
            given[key] = values[0]
    return given


ARCHITECTURE = Architecture(
    name="hunyuan_v1_moe",
    hf_class="HunYuanMoEV1ForCausalLM",
    defaults={**hunyuan.ARCHITECTURE.defaults, "num_experts": 1, "moe_topk": 1},
    read=read,
    said_otherwise=_of_all_layers,
    renamed={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    tensors={
        **hunyuan.ARCHITECTURE.tensors,
        "mlp.gate.wg": "mlp.gate",
        "mlp.shared_mlp": "mlp.shared_experts",
    },
    layer_class=hunyuan.layer_class,
    gguf=GGUFNames(
        "hunyuan-moe",
        tensors=EXPERT_TENSORS,
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
)
