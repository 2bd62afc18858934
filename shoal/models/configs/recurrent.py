"""From a config's fields to the kinds of its recurrent layers. No torch."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, LINEAR

STATE_DTYPES = ("float32", "bfloat16")
# `transformers`' defaults of the families with gated delta nets
DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}


def delta_layer(fields: ConfigFields) -> LayerKind:
    """A layer with a gated delta net."""
    keys, values = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if values % keys:
        raise CheckpointError(
            f"{fields.where}: linear_num_value_heads must be a multiple of linear_num_key_heads {keys}, got "
            f"{values}"
        )
    return LayerKind(
        DeltaKind(
            keys,
            values,
            fields.count("linear_key_head_dim"),
            fields.count("linear_value_head_dim"),
            fields.count("linear_conv_kernel_dim", least=2),
            state_dtype(fields, "mamba_ssm_dtype"),
        )
    )


def granite_mamba_layer(fields: ConfigFields) -> LayerKind:
    """A layer with Mamba-2, by Granite's names."""
    heads, inner = fields.count("mamba_n_heads"), fields.count("mamba_expand") * fields.count("hidden_size")
    given = fields.get("mamba_d_head")
    head_dim = inner // heads if given == "auto" else fields.count("mamba_d_head")
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{fields.where}: mamba_n_heads times mamba_d_head must be mamba_expand times hidden_size, which "
            f"is {inner}, got {heads} times {head_dim}"
        )
    return LayerKind(
        Mamba2Kind(
            heads,
            head_dim,
            groups_of(fields, "mamba_n_groups", heads),
            fields.count("mamba_d_state"),
            fields.count("mamba_d_conv", least=2),
            fields.flag("mamba_conv_bias"),
            fields.flag("mamba_proj_bias"),
            *time_step_limit(fields),
            dtype=state_dtype(fields, "mamba_ssm_cache_dtype"),
        )
    )


def groups_of(fields: ConfigFields, key: str, num_heads: int) -> int:
    groups = fields.count(key)
    if num_heads % groups:
        raise CheckpointError(
            f"{fields.where}: {key} must divide the {num_heads} heads of Mamba layers, got {groups}"
        )
    return groups


def time_step_limit(fields: ConfigFields) -> tuple[float, float]:
    """The least and the most that dt may be. transformers writes infinity as an object."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    values = [
        float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value
        for value in (limits if isinstance(limits, list | tuple) else ())
    ]
    if len(values) != 2 or not all(type(value) in (int, float) for value in values):
        raise CheckpointError(f"{fields.where}: time_step_limit must be two numbers, got {limits!r:.80}")
    return float(values[0]), float(values[1])


def parts_of_mamba(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """The runs of a matrix of z, x, B, C and dt."""
    kind = next(kind.mixer for kind in config.layers if isinstance(kind.mixer, Mamba2Kind))
    shared = kind.num_groups * kind.state_size
    return 1, (kind.inner_size, kind.inner_size, shared, shared, kind.num_heads)


def linear_but_every(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """Layer types of which each `full_attention_interval`-th is attention, and the others are recurrent."""
    interval = fields.count("full_attention_interval")
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))


def state_dtype(fields: ConfigFields, key: str) -> str:
    """The dtype in which the config asks for states."""
    dtype = fields.get(key) or "float32"
    if dtype not in STATE_DTYPES:
        raise CheckpointError(f"{fields.where}: {key} must be {' or '.join(STATE_DTYPES)}, got {dtype!r:.80}")
    return dtype
