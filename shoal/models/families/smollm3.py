"""SmolLM3: Llama in which every fourth layer does not rotate q and k."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.families import llama


def rotated(fields: ConfigFields, num_layers: int) -> list[bool]:
    """For each layer, True if it rotates q and k."""
    if not fields.get("no_rope_layers"):
        interval = fields.count("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    flags = fields.each("no_rope_layers", num_layers)
    return [each.count("no_rope_layers", least=0) != 0 for each in flags]


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    return tuple(SLIDING if slides and not has_rope else FULL for has_rope in rotated(fields, num_layers))


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    layers = zip(config.layers, rotated(fields, config.num_layers))
    return replace(
        llama.read(config, fields),
        layers=tuple(kind if has_rope else kind.with_attention(rope=None) for kind, has_rope in layers),
    )


ARCHITECTURE = Architecture(
    name="smollm3",
    hf_class="SmolLM3ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
    },
    read=read,
    layer_types=layer_types,
    gguf=GGUFNames("smollm3", interleaved=True),
)
