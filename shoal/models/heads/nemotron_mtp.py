"""The MTP head of Nemotron 3: layers of one mixer each, attention or experts, by a pattern of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, RENAMED
from shoal.models.heads.mtp_family import MtpFamily, one_more_layer
from shoal.models.hybrids.nemotron_h import EXPERTS, LETTERS


def layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """The type of each layer of the head. Raises CheckpointError for layers that no published head has."""
    key = "mtp_hybrid_override_pattern"
    given: Any = fields.get(key)
    if given is None:
        key = "mtp_layers_block_type"
        given = fields.get(key) or [FULL, EXPERTS]
    kinds = [LETTERS.get(kind, RENAMED.get(kind, kind)) for kind in given if isinstance(kind, str)]
    if not kinds or len(kinds) != len(given) or not set(kinds) <= {FULL, EXPERTS}:
        raise CheckpointError(
            f"{fields.where}: {key} must be layers of attention and experts, got {given!r:.80}; other draft "
            "heads are not supported"
        )
    return tuple(kinds)


def layers(config: ModelConfig, fields: ConfigFields) -> tuple[LayerKind, ...]:
    of_type = {
        FULL if kind.attention is not None else EXPERTS: kind for kind in config.layers if _drafts(kind)
    }
    try:
        return tuple(of_type[kind] for kind in layer_types(fields))
    except KeyError as error:
        raise CheckpointError(
            f"{fields.where}: the draft head has a layer of type {error}, and the model has none"
        ) from None


def _drafts(kind: LayerKind) -> bool:
    return kind.attention is not None or kind.experts is not None


def names(config: ModelConfig, num_layers: int) -> Mapping[str, str]:
    return {
        "mtp.layers.0.enorm.": "embedding_norm.",
        "mtp.layers.0.hnorm.": "hidden_norm.",
        "mtp.layers.0.eh_proj.": "fc.",
        f"mtp.layers.{num_layers - 1}.final_layernorm.": "norm.",
        "mtp.layers.": "layers.",
    }


def gguf_names(config: ModelConfig, num_layers: int) -> Mapping[str, str]:
    """The two layers of a head are one block of the file."""
    own = f"layers.{config.num_layers}."
    return {
        f"{own}post_attention_layernorm.": "layers.1.input_layernorm.",
        f"{own}mlp.": "layers.1.mlp.",
        **one_more_layer(config, num_layers),
    }


FAMILY = MtpFamily(
    architectures=("nemotron_h",), names=names, layers=layers, reads_first=False, gguf_names=gguf_names
)
