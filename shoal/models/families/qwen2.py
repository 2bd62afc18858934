"""Qwen2 and Qwen2.5: biases on q, k and v; windows in some layers, if the config turns them on."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.config_fields import ConfigFields, sliding_window


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, qkv_bias=True, layers=windowed(config.layers, fields))


def windowed(layers: tuple[LayerKind, ...], fields: ConfigFields) -> tuple[LayerKind, ...]:
    """Gives layers their windows. With use_sliding_window the layers that layer_types names have one, or else
    the layers from max_window_layers on."""
    window, num_layers = sliding_window(fields), len(layers)
    if not fields.flag("use_sliding_window") or window is None:
        return layers
    kinds = fields.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise CheckpointError(f"{fields.where}: layer_types must be a list of texts, got {kinds!r:.80}")
    if kinds is None:
        first = fields.count("max_window_layers", least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.where}: layer_types must name full_attention or sliding_attention for each of "
            f"{num_layers} layers; found {unknown[:4] or len(kinds)}"
        )
    return tuple(
        layer.with_attention(window=window) if kind == "sliding_attention" else layer
        for layer, kind in zip(layers, kinds)
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
    gguf=GGUFNames("qwen2"),
)
