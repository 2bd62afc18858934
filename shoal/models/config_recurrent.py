"""From a config's fields to the kinds of its recurrent layers. No torch."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.kinds.recurrent import DeltaKind
from shoal.model_config import LayerKind
from shoal.models.config_fields import ConfigFields
from shoal.models.config_layers import FULL, LINEAR

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
