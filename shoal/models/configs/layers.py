"""Layer types of a config, and the patterns where a config has none. No torch."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.latent import LatentKind
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"
# layer type -> config field with the number of positions in its window
WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
# spellings of older configs -> newer ones
RENAMED = {"attention": FULL, "mamba": LINEAR}


def given_layer_types(fields: ConfigFields, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """The config's layer_types; None if it has none. Raises CheckpointError for other types than `known`."""
    given = fields.get("layer_types")
    if given is None:
        return None
    texts = [kind for kind in given if isinstance(kind, str)] if isinstance(given, list) else []
    if not texts or len(texts) != len(given):
        raise CheckpointError(f"{fields.where}: layer_types must be a list of texts, got {given!r:.80}")
    kinds = tuple(RENAMED.get(kind, kind) for kind in texts)
    if unknown := sorted(set(kinds) - set(known)):
        raise CheckpointError(
            f"{fields.where}: layer_types must be {' or '.join(known)} for this architecture, got "
            f"{', '.join(unknown[:4])!r:.200}"
        )
    return kinds


def check_length(fields: ConfigFields, kinds: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """Returns the kinds. Raises CheckpointError unless there is one for each layer."""
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.where}: layer_types must have a type for each of {num_layers} layers, got {len(kinds)}"
        )
    return kinds


def full_every(step: int, num_layers: int) -> tuple[str, ...]:
    """Each step-th layer sees all positions, and the others slide."""
    return tuple(SLIDING if (i + 1) % step else FULL for i in range(num_layers))


def attention_of(kind: LayerKind) -> AttentionKind | LatentKind:
    """Returns the attention of a layer of a model whose layers all have one."""
    assert kind.attention is not None
    return kind.attention


def rotating_in_windows(config: ModelConfig) -> ModelConfig:
    """Returns the config with a rope in layers with a window alone."""
    layers = (
        kind.with_attention(rope=None) if attention_of(kind).window is None else kind
        for kind in config.layers
    )
    return replace(config, layers=tuple(layers))
