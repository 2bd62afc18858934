"""Frequencies of rotary position embeddings (Su 2021).

They are computed in float32 in the order that `transformers` uses, as models were trained with those
roundings. numpy only.
"""

from __future__ import annotations

import numpy as np

from shoal.kinds.rope import RopeConfig
from shoal.models.rope_scaling import at_length, scaled


def rope_frequencies(rope: RopeConfig, rotary_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Returns the angles that one position adds, float32 [rotary_dim / 2], and the factor on cosines and
    sines. `max_position`: the engine's, on which longrope and dynamic ropes depend."""
    rope = at_length(rope, rotary_dim, max_position)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # Wavelengths are in units of 2 pi positions. They are rounded once, from float64: float32 powers of numpy
    # and torch differ in a last bit, which grows tenfold in llama3's blend.
    wavelengths = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "default":
        return np.float32(1.0) / wavelengths, rope.attention_factor
    return scaled(rope, wavelengths), rope.attention_factor
