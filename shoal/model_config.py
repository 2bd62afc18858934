"""ModelConfig: a description of a model, independent of the file that it was read from.

models/config_json.py and models/config_gguf.py build it from a config.json and from a GGUF file's metadata.
No torch. models/rope.py computes with the numbers of rope.
"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Only the fields of its kind apply. `attention_factor` is final: yarn's is computed
    from the other fields if a config does not have it."""

    theta: float = ROPE_THETA
    kind: str = "default"  # "default", "linear", "yarn", "llama3", or "factors", which is GGUF's table
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()  # each frequency is divided by its own


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint's matrices, from its config. models/layouts/ has a file for each
    layout."""

    layout: str  # the name of a layout in models/layouts/registry.py
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale; 0: all
    zero_points: bool = False  # each scale has a zero point
    act_order: bool = False  # a tensor has the group of each input
    zeros_minus_one: bool = False  # zero points are stored minus one


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and flags of a model. Sizes are for the whole model, not for one rank."""

    architecture: str  # the name of an architecture in models/registry.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    # for each layer, the number of positions that a token attends to, with itself; None: all before it
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    has_head: bool = True  # False: the files have no output head, so the model only embeds
    qk_norm: bool = False  # norm of each head of q and k before the rotation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0  # factor of embeddings
    attention_multiplier: float | None = None  # factor of q k^T; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0  # factor of the outputs of attention and MLP
    logits_scaling: float = 1.0  # divisor of logits
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str | None = None  # the checkpoint's, by torch's name; None: not in its config
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = (
        None  # for a Hugging Face checkpoint; a GGUF file has a type for each tensor
    )

    @property
    def attention_scale(self) -> float:
        """Returns the factor of q k^T before the softmax."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def kv_head_replicas(self, tp_size: int) -> int:
        """Returns the number of ranks with the same kv head; above 1 if there are more ranks than kv
        heads."""
        return max(1, tp_size // self.num_kv_heads)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        return self.num_kv_heads * self.kv_head_replicas(tp_size) // tp_size

    def is_moe_layer(self, layer: int) -> bool:
        """True if a layer is a mixture of experts. Layers with the same value have tensors of the same
        shapes."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )
