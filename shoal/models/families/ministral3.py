"""Ministral 3: Mistral with queries that grow with their position."""

from __future__ import annotations

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.rope import query_scaling, rope_values
from shoal.models.families import mistral


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    given = {"llama_4_scaling_beta": fields.get("temperature_scale"), **rope_values(fields)}
    config = mistral.read(config, fields)
    rope = config.attention.rope
    assert rope is not None
    scaling = query_scaling(rope, ConfigFields(given, f"{fields.where}: rope parameters"))
    return config if scaling is None else config.with_attention(query_scaling=scaling)


ARCHITECTURE = Architecture(
    name="ministral3",
    hf_class="Ministral3ForCausalLM",
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    read=read,
    nested_in=("Mistral3ForConditionalGeneration",),
    gguf=GGUFNames("mistral3", keys={"attention.temperature_scale": "temperature_scale"}, interleaved=True),
)
