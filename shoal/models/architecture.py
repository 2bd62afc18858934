"""Architecture: what a family's file says of its models. models/registry.py lists them.

No torch: processes that build no model read configs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.checkpoint_names import Stored
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.configs.rope import SlidingRope

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """Names in GGUF files of an architecture, beyond the names that all of them share
    (models/config_gguf.py, weights/gguf/tensors.py)."""

    architecture: str  # general.architecture
    # A tensor's name within its layer -> the checkpoint's: "ffn_norm": "post_attention_layernorm". A name
    # with a parameter stands for a tensor without one: "attn_sinks.weight": "self_attn.sinks".
    tensors: Mapping[str, str] = field(default_factory=dict)
    # a metadata key, without the architecture's prefix -> config.json's key
    keys: Mapping[str, str] = field(default_factory=dict)
    # config.json's keys that no metadata says, with their values
    values: Mapping[str, Any] = field(default_factory=dict)
    # From the other fields to further keys that no metadata says. None: there are no such keys.
    derived: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    # a metadata key, without the prefix -> the other model that a file with this key holds, which is refused
    refused: Mapping[str, str] = field(default_factory=dict)
    # a metadata key, without the prefix -> the name of the architecture that a file with this key is of, or
    # the names for some of its values
    others: Mapping[str, str | Mapping[int, str]] = field(default_factory=dict)
    # a metadata key, without the prefix -> the name of the architecture of files that lack it
    without: Mapping[str, str] = field(default_factory=dict)
    # whether the rows of q and k lie in the order of interleaved rotary pairs
    interleaved: bool = False
    # ends of checkpoint names of tensors to whose numbers the file has 1 added
    raised: tuple[str, ...] = ()
    also_named: tuple[str, ...] = ()  # other values of general.architecture
    # for models with recurrent layers: a tensor's name within its layer -> the type of layers that have it
    layers: Mapping[str, str] = field(default_factory=dict)
    # whether value heads lie one of each key head after another
    moves_value_heads: bool = False
    # config.json's keys whose numbers may differ by layer. `derived` takes them as lists.
    by_layer: tuple[str, ...] = ()
    # whether rope_freqs.weight is there, and for layers without a window alone
    full_rope_factors: bool = False


def keep(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """The `read` of an architecture without flags of its own."""
    return config


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. A checkpoint's names and shapes are not listed here, as its modules have them, but
    for those that differ from the modules'."""

    name: str  # `transformers`' model_type, and ModelConfig.architecture
    hf_class: str  # the class in "architectures" of config.json: "Qwen3ForCausalLM"
    # The values that `transformers`' config class fills in. num_key_value_heads None: as many as there are
    # heads. Only architectures with a partial_rotary_factor here may rotate a part of each head.
    defaults: Mapping[str, Any]
    # from what all architectures share, and a config's fields, to the whole ModelConfig
    read: Callable[[ModelConfig, ConfigFields], ModelConfig] = keep
    # Returns the type of each layer where a config has no layer_types. None: layers do not differ by type,
    # or `read` says how.
    layer_types: Callable[[ConfigFields, int], tuple[str, ...]] | None = None
    known_layer_types: tuple[str, ...] = (FULL, SLIDING)
    # a further layer type -> its layers, from a config's fields; layers of other types have attention
    other_layers: Mapping[str, Callable[[ConfigFields], LayerKind]] = field(default_factory=dict)
    # None: layers with a window have the rope of the others, unless the config keys it by layer type.
    sliding_rope: SlidingRope | None = None
    nested_in: tuple[str, ...] = ()  # multimodal classes whose text_config is one of this architecture
    also_named: tuple[str, ...] = ()  # other model_types that such a text_config may have
    # Returns fields that a config says in other words. They take the place of the config's own. None: all
    # configs use the same words.
    said_otherwise: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    # a key that newer configs use -> the key that is read here
    renamed: Mapping[str, str] = field(default_factory=dict)
    # a name within a layer that checkpoints have -> the decoder's name, or the parts of what has that name
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    # q and k rotate the pairs (2i, 2i + 1) of each head: rows are moved while they load, as the decoder
    # rotates the pairs (i, i + N/2)
    interleaved: bool = False
    gguf: GGUFNames | None = None  # None: no GGUF file of it is read
    # Returns the class of its decoder layers. It is a function, as the class needs torch. None: DecoderLayer.
    layer_class: Callable[[], type[nn.Module]] | None = None
