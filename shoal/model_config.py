"""ModelConfig: a description of a model and of each of its layers, independent of the file that it was read
from.

models/config_json.py and models/config_gguf.py build it from a config.json and from a GGUF file's metadata.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shoal.kinds.attention import OutputGate, QueryScaling
from shoal.kinds.experts import ExpertsKind
from shoal.kinds.latent import LatentKind
from shoal.kinds.quantization import Quantization
from shoal.kinds.recurrent import RecurrentKind
from shoal.kinds.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention of a layer. Numbers of heads are for the whole model, not for one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # the factor of q k^T before the softmax
    rope: RopeConfig | None  # None: positions do not rotate q and k
    window: int | None = None  # how many positions a token sees, with its own; None: all before it
    # windows begin at multiples of their size: a token sees its own chunk of positions, up to itself
    in_chunks: bool = False
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: bool = False  # each query head has a learned logit in the softmax that brings no value
    qk_rms: bool = False  # each head of q and k is divided by its rms before the rotation
    v_norm: bool = False  # each head of v is divided by its rms
    query_scaling: QueryScaling | None = None
    gate: OutputGate | None = None
    v_is_k: bool = False  # v is k before its norm and rotation; the checkpoint has no matrix of v
    kv_layer: int | None = None  # the layer whose keys and values it reads; None: it has its own

    planes: ClassVar[int] = 2  # the cache has keys and values

    @property
    def rotary_dim(self) -> int:
        """Twice the number of angles of a position."""
        return 0 if self.rope is None else self.rope.rotary_dim(self.head_dim)

    def kv_head_replicas(self, tp_size: int) -> int:
        """Returns the number of ranks with the same kv head; above 1 if there are more ranks than kv
        heads."""
        return max(1, tp_size // self.num_kv_heads)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        return self.num_kv_heads * self.kv_head_replicas(tp_size) // tp_size


MixerKind = AttentionKind | LatentKind | RecurrentKind


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A description of a layer: everything in which the layers of a model differ. Layers of equal kinds have
    tensors of the same shapes and launch the same kernels."""

    mixer: MixerKind | None  # None: the layer is an MLP alone
    experts: ExpertsKind | None = None  # None: a dense MLP of ModelConfig.intermediate_size
    intermediate_size: int | None = None  # its dense MLP's; None: ModelConfig.intermediate_size
    has_mlp: bool = True  # False: the layer is a mixer alone

    @property
    def attention(self) -> AttentionKind | LatentKind | None:
        """The mixer if it has keys and values. The engine asks any of them for num_heads, num_kv_heads,
        head_dim, planes, rope, rotary_dim, window, kv_layer and kv_heads_per_rank."""
        return self.mixer if isinstance(self.mixer, AttentionKind | LatentKind) else None

    def with_attention(self, **changes: Any) -> LayerKind:
        attention = self.attention
        return self if attention is None else replace(self, mixer=replace(attention, **changes))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and flags of a model. Sizes are for the whole model, not for one rank."""

    architecture: str  # the name of an architecture in models/registry.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # that dense MLPs have
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerKind, ...]
    tie_word_embeddings: bool = False
    has_head: bool = True  # False: the files have no output head, so the model only embeds
    norm: str = "plain"  # the kind of the norms, by the names of layers/norm_kinds.py
    qk_norm: bool = False  # norm of each head of q and k before the rotation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # for gated MLPs, by the names of kernels/reference.py
    embedding_multiplier: float = 1.0  # factor of embeddings
    per_layer_size: int = 0  # numbers of a token's embedding for each layer; 0: there is one for all layers
    per_layer_vocab_size: int = 0
    embedding_norm: bool = False  # embeddings are divided by their rms
    post_norm_eps: float | None = (
        None  # for the norms of what attention and MLP add; None: the layer has no such norms
    )
    residual_multiplier: float = 1.0  # factor of the outputs of attention and MLP
    logits_scaling: float = 1.0  # divisor of logits
    logits_softcap: float | None = None  # logits are cap * tanh(logits / cap)
    head_layers: tuple[LayerKind, ...] = ()  # a draft head's, whose caches follow the layers' own
    head_drafts: int | None = None  # the drafts a step that its config names
    num_draft_layers: int = 0  # further layers in the files, which draft tokens; they are not loaded
    dtype: str | None = None  # the checkpoint's, by torch's name; None: not in its config
    eos_token_ids: tuple[int, ...] = ()
    # for a Hugging Face checkpoint; a GGUF file has a type for each tensor
    quantization: Quantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[LayerKind, ...]:
        """The layers that a step runs, a draft head's last."""
        return self.layers + self.head_layers

    @property
    def attention(self) -> AttentionKind | LatentKind:
        """The attention of the first layer that has one."""
        return next(kind.attention for kind in self.layers if kind.attention is not None)

    @property
    def experts(self) -> ExpertsKind | None:
        """The experts of the layers that have some. None: all layers are dense."""
        return next((kind.experts for kind in self.layers if kind.experts is not None), None)

    def with_attention(self, **changes: Any) -> ModelConfig:
        """Returns the config with these changes of every layer that has attention."""
        return replace(self, layers=tuple(kind.with_attention(**changes) for kind in self.layers))
