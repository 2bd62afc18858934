"""Ministral of 2024: Mistral with windows in the layers that layer_types names."""

from __future__ import annotations

from shoal.models.architecture import Architecture
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.families import mistral

ARCHITECTURE = Architecture(
    name="ministral",
    hf_class="MinistralForCausalLM",
    defaults=mistral.ARCHITECTURE.defaults,
    layer_types=lambda fields, n: ((SLIDING if fields.get("sliding_window") else FULL),) * n,
)
