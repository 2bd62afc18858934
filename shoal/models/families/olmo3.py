"""OLMo 3: OLMo 2 with windows in three of four layers. Scaled ropes are for the other layers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.models.architecture import Architecture
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import full_every
from shoal.models.configs.rope import rope_values
from shoal.models.families import olmo2


def _sliding_rope(fields: ConfigFields) -> Mapping[str, Any]:
    return {"rope_theta": rope_values(fields).get("rope_theta")}


ARCHITECTURE = Architecture(
    name="olmo3",
    hf_class="Olmo3ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    },
    read=olmo2.read,
    layer_types=lambda fields, num_layers: full_every(4, num_layers),
    sliding_rope=_sliding_rope,
    layer_class=olmo2.layer_class,
)
