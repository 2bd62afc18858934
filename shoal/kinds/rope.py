"""RopeConfig: the rotary embedding of a layer, by numbers. models/rope.py computes with them. No torch."""

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
