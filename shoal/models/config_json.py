"""From the content of a config.json, old form or new, to a ModelConfig.

Missing optional fields get the defaults of `transformers`' config classes. What this engine can't run is
refused here, by name. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.rope import ROPE_THETA, RopeConfig
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.config_fields import ConfigFields
from shoal.models.layouts.registry import read_quantization
from shoal.models.registry import ARCHITECTURES, BY_HF_CLASS, BY_NAME

ROPE_KINDS = ("default", "linear", "yarn", "llama3")


def config_from_json(config: Mapping[str, Any], where: str) -> ModelConfig:
    """`where` names the file in errors. Raises CheckpointError for what is missing, impossible or not
    supported."""
    architecture = architecture_of(config, where)
    renamed = {key: config[new] for new, key in architecture.renamed.items() if new in config}
    fields = ConfigFields({**architecture.defaults, **renamed, **config}, where)
    _refuse_unsupported(fields, where)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and no head_dim is given"
        )
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")
    num_layers, max_position = fields.count("num_hidden_layers"), fields.count("max_position_embeddings")
    attention = AttentionKind(
        num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, rope=_rope(fields, max_position)
    )
    shared = ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=(LayerKind(attention),) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        eos_token_ids=fields.ids("eos_token_id"),
        quantization=read_quantization(fields),
    )
    return architecture.read(shared, fields)


def architecture_of(config: Mapping[str, Any], where: str) -> Architecture:
    """Raises CheckpointError if it is not supported."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in filter(lambda name: isinstance(name, str), names):
        # Models for embeddings name the class below the head, such as MistralModel.
        for hf_class in (name, name.removesuffix("Model") + "ForCausalLM"):
            if hf_class in BY_HF_CLASS:
                return BY_HF_CLASS[hf_class]
    model_type = config.get("model_type")
    if not names and isinstance(model_type, str) and model_type in BY_NAME:
        return BY_NAME[model_type]
    shown = ", ".join(map(str, names[:4])) if names else model_type
    supported = ", ".join(architecture.hf_class for architecture in ARCHITECTURES)
    raise CheckpointError(f"{where}: architecture {shown!r:.200} is not supported; these are: {supported}")


def _refuse_unsupported(fields: ConfigFields, where: str) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {activation!r:.80} is not supported; only silu is")


def _rope(fields: ConfigFields, max_position: int) -> RopeConfig:
    """The old form has rope_theta, and rope_scaling with "type" or "rope_type"; in the new one
    rope_parameters holds all of it. If both are there, rope_scaling wins, as in transformers."""
    where = fields.where
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"{where}: rope parameters per layer type are not supported: {given!r:.120}")
    kind = given.get("rope_type") or given.get("type") or "default"
    rope = ConfigFields(
        {
            "rope_theta": fields.get("rope_theta"),
            "partial_rotary_factor": fields.get("partial_rotary_factor"),
            **{key: value for key, value in given.items() if value is not None},
        },
        f"{where}: rope {kind!s:.80}",
    )
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{where}: rope type {kind!r:.80} is not supported; these are: {', '.join(ROPE_KINDS)}"
        )
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {rope.get('partial_rotary_factor')} is not supported; only 1.0 "
            "is"
        )
    theta = rope.number("rope_theta", ROPE_THETA)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=rope.number("factor"))
    original = fields.count(
        "original_max_position_embeddings", rope.count("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        scaled = RopeConfig(
            theta,
            kind,
            factor=rope.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
        if scaled.high_freq_factor <= scaled.low_freq_factor:
            raise CheckpointError(
                f"{where}: rope high_freq_factor {scaled.high_freq_factor} is not above low_freq_factor "
                f"{scaled.low_freq_factor}"
            )
        return scaled
    factor = rope.number("factor", max_position / original)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=yarn_attention_factor(rope, factor),
    )


def yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    """Returns the factor by which yarn multiplies cosines and sines, unless the config says it."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _dtype(fields: ConfigFields) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None
