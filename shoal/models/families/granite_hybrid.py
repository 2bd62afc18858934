"""Granite 4 without Mamba layers and experts: Granite 3 with other names, and without rope if the config says
so."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.checkpoint_names import Stack
from shoal.models.config_fields import ConfigFields
from shoal.models.config_layers import FULL, LINEAR
from shoal.models.families import granite


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    if num_experts := fields.count("num_local_experts", least=0):
        raise CheckpointError(
            f"{fields.where}: num_local_experts must be 0 for this architecture, got {num_experts}; "
            "Granite's mixtures of experts are not supported"
        )
    config = granite.read(config, fields)
    if fields.get("position_embedding_type") != "rope":
        config = config.with_attention(rope=None)
    return replace(config, intermediate_size=fields.count("shared_intermediate_size"))


ARCHITECTURE = Architecture(
    name="granitemoehybrid",
    hf_class="GraniteMoeHybridForCausalLM",
    defaults={
        **granite.ARCHITECTURE.defaults,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        "intermediate_size": 11008,
    },
    read=read,
    layer_types=lambda fields, num_layers: (LINEAR,) * num_layers,
    known_layer_types=(FULL,),
    tensors={
        "shared_mlp.input_linear": Stack(("mlp.gate_proj", "mlp.up_proj")),
        "shared_mlp.output_linear": "mlp.down_proj",
    },
)
