"""From a config's fields to the RopeConfig of each type of layer.

The old form has rope_theta, and rope_scaling with "type" or "rope_type"; in the new one rope_parameters holds
all of it, for all layers or keyed by layer type. If both are there, rope_scaling wins, as in transformers.
No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.attention import QueryScaling
from shoal.kinds.rope import ROPE_THETA, RopeConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import SLIDING

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
# From a config's fields to the rope parameters of layers with a window, where its form has one rope.
SlidingRope = Callable[[ConfigFields], Mapping[str, Any]]


def rope_values(fields: ConfigFields) -> Mapping[str, Any]:
    """The rope parameters in either form, without the other fields."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{fields.where}: rope_parameters must be an object, got {given!r:.120}")
    return given


def read_ropes(
    fields: ConfigFields,
    layer_types: Collection[str],
    head_dim: int,
    *,
    keyed: bool,
    partial: bool,
    sliding: SlidingRope | None,
) -> dict[str, RopeConfig]:
    """The rope of each layer type. `keyed`: the architecture reads parameters by layer type; `partial`: it
    rotates a part of each head if the config says so."""
    given = rope_values(fields)
    is_keyed = any(isinstance(value, dict) for value in given.values())
    if is_keyed and not keyed:
        raise CheckpointError(
            f"{fields.where}: rope parameters per layer type are not supported for this architecture: "
            f"{given!r:.120}"
        )
    ropes = {}
    for kind in layer_types:
        own = given
        if is_keyed:
            own = given.get(kind) or {}
        elif kind == SLIDING and sliding is not None:
            own = sliding(fields)
        if not isinstance(own, dict):
            raise CheckpointError(
                f"{fields.where}: rope parameters of {kind} must be an object, got {own!r:.80}"
            )
        if is_keyed and kind == SLIDING:  # Gemma 3 has another base there, and its defaults say which
            own = {"rope_theta": fields.get("rope_local_base_freq"), **own}
        ropes[kind] = _rope(fields, own, head_dim, partial)
    return ropes


def _rope(fields: ConfigFields, own: Mapping[str, Any], head_dim: int, partial: bool) -> RopeConfig:
    where, max_position = fields.where, fields.count("max_position_embeddings")
    kind = own.get("rope_type") or own.get("type") or "default"
    if kind == "su" or (kind == "yarn" and own.get("long_factor")):
        kind = "longrope"  # Phi-3's first configs
    if kind == "mrope":
        kind = "default"  # Qwen2-VL's, of pictures; a text's positions are the same in all sections
    share = fields.get("partial_rotary_factor")
    if fields.get("rotary_dim") is not None:  # MiniMax
        share = fields.count("rotary_dim") / head_dim
    rope = ConfigFields(
        {
            "rope_theta": fields.get("rope_theta"),
            "partial_rotary_factor": share,
            **{key: value for key, value in own.items() if value is not None},
        },
        f"{where}: rope {kind!s:.80}",
    )
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{where}: rope type {kind!r:.80} is not supported; these are: {', '.join(ROPE_KINDS)}"
        )
    theta, share = rope.number("rope_theta", ROPE_THETA), rope.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {share:g} is not supported for this architecture; only 1.0 is"
        )
    rotary_dim = _rotary_dim(fields, share, head_dim, may_be_odd=kind == "proportional")
    if kind == "default":
        return RopeConfig(theta, partial=share)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=rope.number("factor"), partial=share)
    if kind == "dynamic" and rotary_dim < 4:
        raise CheckpointError(
            f"{where}: head_dim must leave at least 4 numbers to a dynamic rope, got {rotary_dim}; is it "
            "damaged?"
        )
    if kind == "dynamic" and own.get("alpha"):  # Hunyuan stretches theta once, whatever the length
        return RopeConfig(theta * rope.number("alpha") ** (rotary_dim / (rotary_dim - 2)))
    if kind == "dynamic":
        return RopeConfig(theta, kind, rope.number("factor"), max_position, partial=share)
    if kind == "proportional":
        return RopeConfig(theta, kind, factor=rope.number("factor", 1.0), partial=share)
    original = fields.count(
        "original_max_position_embeddings", rope.count("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        return _llama3(rope, theta, original, share)
    if kind == "yarn" and rope.get("factor") is None and original == max_position:
        raise CheckpointError(
            f"{where}: rope yarn must have a factor, or an original_max_position_embeddings other than "
            f"max_position_embeddings {max_position}, got neither; add one of them"
        )
    factor = rope.number("factor", max_position / original)
    if kind == "longrope":
        return RopeConfig(
            theta,
            kind,
            factor,
            original,
            factors=_factors(rope, "short_factor", rotary_dim // 2),
            long_factors=_factors(rope, "long_factor", rotary_dim // 2),
            attention_factor=longrope_attention_factor(rope, factor, original),
            partial=share,
        )
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=yarn_attention_factor(rope, factor),
        partial=share,
    )


def _rotary_dim(fields: ConfigFields, share: float, head_dim: int, may_be_odd: bool) -> int:
    """Returns how many numbers of a head are rotated. Raises CheckpointError unless they are pairs."""
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or (rotary_dim % 2 and not may_be_odd):
        name, got = "partial_rotary_factor", f"{share:g}"
        if fields.get("rotary_dim") is not None:
            name, got = "rotary_dim", str(rotary_dim)
        raise CheckpointError(
            f"{fields.where}: {name} must leave pairs of head_dim {head_dim} to rotate, got {got}"
        )
    return rotary_dim


def _llama3(rope: ConfigFields, theta: float, original: int, share: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:  # Llama 4 Scout has both at 1
        raise CheckpointError(
            f"{rope.where}: high_freq_factor must be at least low_freq_factor {low:g}, got {high:g}; "
            "correct one of them"
        )
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
        partial=share,
    )


def _factors(rope: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    return tuple(each.number(key) for each in rope.each(key, count))


def longrope_attention_factor(rope: ConfigFields, factor: float, original: int) -> float:
    """Returns the factor by which longrope multiplies cosines and sines, unless the config says it."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    return math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0


def query_scaling(rope: RopeConfig, given: ConfigFields) -> QueryScaling | None:
    """Returns how queries grow with their position; None if the rope parameters do not say it, or say 0."""
    if not given.get("llama_4_scaling_beta"):
        return None
    length = rope.original_max_position_embeddings or given.count("original_max_position_embeddings")
    return QueryScaling(given.number("llama_4_scaling_beta"), length)


def yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """Returns the factor by which yarn multiplies cosines and sines, unless the config says it."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
