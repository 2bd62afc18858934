"""From a config's fields to the LatentKind of its layers. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.errors import CheckpointError
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig
from shoal.model_config import ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.rope import query_scaling, rope_values


def with_latents(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Returns the config with latent attention in the place of other attention."""
    rank = None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
    nope, rotary = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    if rotary % 2:
        raise CheckpointError(
            f"{fields.where}: qk_rope_head_dim must be even, got {rotary}; rotary embeddings need pairs"
        )
    bias = fields.flag("attention_bias")
    if bias and rank is None:
        raise CheckpointError(
            f"{fields.where}: attention_bias must be false where q_lora_rank is null, got true; no published "
            "model has both"
        )
    rope = config.attention.rope
    if rope is not None:
        # A config says which share of a key is rotated, and qk_rope_head_dim says how many numbers that are.
        rope = replace(rope, partial=1.0)
    kind = LatentKind(
        num_heads=config.attention.num_heads,
        q_lora_rank=rank,
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=fields.count("v_head_dim"),
        scale=(nope + rotary) ** -0.5 * _scale_factor(rope, fields),
        rope=rope,
        # null is false, as transformers reads it
        interleaved=fields.flag("rope_interleave", "rope_interleave" not in fields.values),
        bias=bias,
        query_scaling=None if rope is None else query_scaling(rope, _rope_fields(fields)),
    )
    return replace(
        config,
        layers=tuple(
            layer if layer.attention is None else replace(layer, mixer=kind) for layer in config.layers
        ),
    )


def _rope_fields(fields: ConfigFields) -> ConfigFields:
    return ConfigFields(rope_values(fields), f"{fields.where}: rope")


def _scale_factor(rope: RopeConfig | None, fields: ConfigFields) -> float:
    """Scaled ropes also scale the scores, in addition to what they do to cosines and sines."""
    given = _rope_fields(fields)
    if rope is None or rope.kind == "default" or not given.get("mscale_all_dim"):
        return 1.0
    factor = rope.factor
    mscale = 0.1 * given.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return mscale * mscale
