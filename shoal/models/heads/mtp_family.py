"""`MtpFamily`: how the checkpoints of a family hold the MTP head of their model: its layers, and the names of
its tensors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """An MTP head has the modules `embedding_norm`, `hidden_norm`, `fc`, `layers.0` and so on. Its `norm`,
    `embed_tokens` and `lm_head` may be the target's."""

    architectures: tuple[str, ...]  # the targets', by their names in models/registry.py
    # From the target's config and the number of the head's layers to the prefixes of its tensors in a
    # checkpoint, without the `model.` before them -> the prefixes in the module. The first that fits counts.
    names: Callable[[ModelConfig, int], Mapping[str, str]]
    # the head's layers, from the target's config and the fields of config.json
    layers: Callable[[ModelConfig, ConfigFields], tuple[LayerKind, ...]]
    shares_norm: bool = False  # its last norm is the target's
