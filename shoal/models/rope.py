"""Frequencies of rotary position embeddings (Su 2021), plain or scaled: linear, yarn (Peng 2023), llama3, and
GGUF's table of factors.

They are computed in float32 in the order that `transformers` uses, as models were trained with those
roundings. numpy only.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.kinds.rope import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Returns the angles that one position adds, float32 [head_dim / 2], and the factor on cosines and
    sines."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Wavelengths are in units of 2 pi positions. They are rounded once, from float64: float32 powers of numpy
    # and torch differ in a last bit, which grows tenfold in llama3's blend.
    wavelengths = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / wavelengths
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), rope.attention_factor
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths), rope.attention_factor
    if rope.kind == "llama3":
        return _llama3(rope, plain), rope.attention_factor
    if rope.kind == "factors":
        return plain / np.array(rope.factors, dtype=np.float32), rope.attention_factor
    return plain, rope.attention_factor


def _yarn(rope: RopeConfig, wavelengths: np.ndarray) -> np.ndarray:
    """Keeps the fast dimensions and interpolates the slow ones, with a linear ramp between them."""
    half = len(wavelengths)
    original = rope.original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        """The dimension, a fraction, that turns `rotations` times within the original context."""
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    one = np.float32(1.0)
    kept = one - ramp
    interpolated = one / (np.float32(rope.factor) * wavelengths)
    return interpolated * (one - kept) + one / wavelengths * kept


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor` and short ones kept; those between are blended smoothly."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / plain
    stretched = plain / np.float32(rope.factor)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - smooth) * plain / np.float32(rope.factor) + smooth * plain
    not_long = np.where(wavelengths < original / high, plain, blended)
    return np.where(wavelengths > original / low, stretched, not_long).astype(np.float32)
