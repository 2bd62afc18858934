"""Scaled frequencies of rotary position embeddings: linear, dynamic (NTK), yarn (Peng 2023), llama3, longrope
(Ding 2024), proportional (Gemma 4), and GGUF's table of factors. numpy only."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shoal.kinds.rope import RopeConfig


def at_length(rope: RopeConfig, rotary_dim: int, max_position: int) -> RopeConfig:
    """Returns the rope of all sequences in an engine for this many positions. Longrope has one of its two
    tables then, and a dynamic rope one theta: with one for each length of a sequence, blocks of a shared
    prefix would hold keys that were rotated by another."""
    original = rope.original_max_position_embeddings
    if rope.kind == "longrope":
        factors = rope.long_factors if max_position > original else rope.factors
        return replace(rope, factors=factors, long_factors=())
    if rope.kind == "dynamic":
        stretch = rope.factor * max(1.0, max_position / original) - (rope.factor - 1)
        return RopeConfig(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)), partial=rope.partial)
    return rope


def scaled(rope: RopeConfig, wavelengths: np.ndarray) -> np.ndarray:
    """Returns the frequencies of a kind other than the default one, whose own have these wavelengths."""
    plain = np.float32(1.0) / wavelengths
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "proportional":
        kept = int(rope.partial * 2 * len(plain) // 2)
        return np.where(np.arange(len(plain)) < kept, plain, 0).astype(np.float32) / np.float32(rope.factor)
    if rope.kind == "longrope":
        return np.float32(1.0) / (np.array(rope.factors, dtype=np.float32) * wavelengths)
    assert rope.kind == "factors", rope.kind
    return plain / np.array(rope.factors, dtype=np.float32)


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
    """Long wavelengths are stretched by `factor` and short ones kept; those between are blended smoothly, if
    there is a range between."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / plain
    stretched = plain / np.float32(rope.factor)
    if low == high:
        return np.where(wavelengths < original / high, plain, stretched).astype(np.float32)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - smooth) * plain / np.float32(rope.factor) + smooth * plain
    not_long = np.where(wavelengths < original / high, plain, blended)
    return np.where(wavelengths > original / low, stretched, not_long).astype(np.float32)
