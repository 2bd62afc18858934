"""Granite SWA with experts in all layers, with or without a shared MLP."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import granite_swa
from shoal.models.mixtures import granite_moe


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    mixture = granite_moe.read(config, fields)
    attention = granite_swa.read(config, fields)
    layers = zip(attention.layers, mixture.layers)
    return replace(mixture, layers=tuple(replace(own, experts=other.experts) for own, other in layers))


ARCHITECTURE: Architecture = replace(
    granite_moe.PLAIN,
    name="granitemoe_swa",
    hf_class="GraniteMoeSWAForCausalLM",
    defaults={**granite_moe.PLAIN.defaults, "sliding_window": 128},
    read=read,
    layer_types=granite_swa.layer_types,
    tensors={
        "block_sparse_moe.experts.gate_up_proj": Stack(
            ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
        ),
        "block_sparse_moe.experts.down_proj": Stack(("mlp.experts.{}.down_proj",)),
        **granite_moe.TENSORS,
    },
)
