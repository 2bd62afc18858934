"""Code World Model: Llama with windows in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from shoal.models.architecture import Architecture
from shoal.models.families import granite_swa

ARCHITECTURE = Architecture(
    name="cwm",
    hf_class="CwmForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [128001, 128008, 128009],
        "rope_theta": 1000000.0,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    read=lambda config, fields: replace(config, mlp_bias=fields.flag("mlp_bias")),
    layer_types=granite_swa.layer_types,
)
