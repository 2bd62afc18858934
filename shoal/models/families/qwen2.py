"""Qwen2 and Qwen2.5: biases on q, k and v; windows in some layers, if the config turns them on."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields, sliding_window
from shoal.models.configs.layers import FULL, SLIDING, check_length, given_layer_types


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, qkv_bias=True, layers=windowed(config.layers, fields))


def windowed(layers: tuple[LayerKind, ...], fields: ConfigFields) -> tuple[LayerKind, ...]:
    """Gives layers their windows. With use_sliding_window the layers that layer_types names have one, or else
    the layers from max_window_layers on."""
    window, num_layers = sliding_window(fields), len(layers)
    if not fields.flag("use_sliding_window") or window is None:
        return layers
    kinds = given_layer_types(fields, (FULL, SLIDING))
    if kinds is None:
        first = fields.count("max_window_layers", least=0)
        kinds = tuple(SLIDING if i >= first else FULL for i in range(num_layers))
    return tuple(
        layer.with_attention(window=window) if kind == SLIDING else layer
        for layer, kind in zip(layers, check_length(fields, kinds, num_layers))
    )


ARCHITECTURE = Architecture(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=read,
    nested_in=("InternVLForConditionalGeneration",),
    gguf=GGUFNames("qwen2", also_named=("qwen2vl",)),  # the text model
)
