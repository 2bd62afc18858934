"""LatentKind: multi-head latent attention (DeepSeek V2) of a layer, by numbers. layers/latent.py computes it.
No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.kinds.attention import QueryScaling
from shoal.kinds.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class LatentKind:
    """The cache has one latent for each token, which all heads share: kv_lora_rank numbers, from which a
    matrix makes each head's key and value, and qk_rope_head_dim rotated numbers, which are the last part of
    each head's key. Numbers of heads are for the whole model, not for one rank."""

    num_heads: int
    q_lora_rank: int | None  # the rank of the queries' projection; None: one matrix of full rank
    kv_lora_rank: int
    qk_nope_head_dim: int  # the part of a query and a key without position
    qk_rope_head_dim: int  # the rotated part
    v_head_dim: int
    scale: float  # the factor of q k^T before the softmax
    rope: RopeConfig | None  # None: keys and queries keep no position (Kimi Linear)
    interleaved: bool = True  # the pairs that are rotated: (2i, 2i + 1), or else (i, i + half)
    bias: bool = False  # in the projections to latents, and in the output's
    query_scaling: QueryScaling | None = None

    num_kv_heads: ClassVar[int] = 1  # as the cache has it; every rank has a copy
    planes: ClassVar[int] = 1
    window: ClassVar[None] = None
    in_chunks: ClassVar[bool] = False
    kv_layer: ClassVar[None] = None

    @property
    def head_dim(self) -> int:
        """Numbers of a token in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    def kv_heads_per_rank(self, tp_size: int) -> int:
        return 1
