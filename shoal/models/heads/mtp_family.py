"""`MtpFamily`: how the checkpoints of a family hold the MTP head of their model: its layers, and the names of
its tensors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields

# From the target's config and the number of the head's layers to the prefixes of its tensors in a checkpoint,
# without the `model.` before them -> the prefixes in the module. The first that fits counts.
HeadNames = Callable[[ModelConfig, int], Mapping[str, str]]


def one_more_layer(config: ModelConfig, num_layers: int) -> Mapping[str, str]:
    """Returns the names of a head that is one more layer after the target's last one."""
    own = f"layers.{config.num_layers}."
    return {
        f"{own}eh_proj.": "fc.",
        f"{own}enorm.": "embedding_norm.",
        f"{own}hnorm.": "hidden_norm.",
        f"{own}shared_head.norm.": "norm.",
        f"{own}shared_head.head.": "lm_head.",
        f"{own}embed_tokens.": "embed_tokens.",
        own: "layers.0.",
    }


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """An MTP head has the modules `embedding_norm`, `hidden_norm`, `fc`, `layers.0` and so on. Its `norm`,
    `embed_tokens` and `lm_head` may be the target's."""

    architectures: tuple[str, ...]  # the targets', by their names in models/registry.py
    names: HeadNames
    # The head's layers, from the target's config and the fields of config.json; a GGUF file has no fields.
    layers: Callable[[ModelConfig, ConfigFields], tuple[LayerKind, ...]]
    shares_norm: bool = False  # its last norm is the target's
    # whether `names` finds the first of several blocks, which then drafts all tokens
    reads_first: bool = True
    # The names of a GGUF file's tensors after weights/gguf/ has translated them. None: no known GGUF file has
    # such a head.
    gguf_names: HeadNames | None = one_more_layer
