"""RopeConfig: the rotary embedding of a layer, by numbers. models/rope.py computes with them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Only the fields of its kind apply. `attention_factor` is final: yarn's and longrope's
    are computed from the other fields if a config does not have them."""

    theta: float = ROPE_THETA
    # "default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", or GGUF's table, "factors"
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn and longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0
    # each frequency is divided by its own
    factors: tuple[float, ...] = ()
    # longrope: takes the place of `factors` in an engine for more than the original positions
    long_factors: tuple[float, ...] = ()
    # The share of a head's dimensions that is rotated: the first ones. Proportional: the share of its pairs,
    # the first ones of those that the whole head has.
    partial: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Twice the number of angles of a position."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)
