"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2's and Qwen3's. Positions of text are the same
in all sections of their ropes."""

from __future__ import annotations

from dataclasses import replace

from shoal.models.families import qwen2, qwen3

QWEN2 = replace(
    qwen2.ARCHITECTURE,
    name="qwen2_vl_text",
    hf_class="Qwen2VLForConditionalGeneration",
    defaults={
        **qwen2.ARCHITECTURE.defaults,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
        "eos_token_id": 151645,
    },
    gguf=None,
)
QWEN25 = replace(QWEN2, name="qwen2_5_vl_text", hf_class="Qwen2_5_VLForConditionalGeneration")
QWEN3 = replace(
    qwen3.ARCHITECTURE,
    name="qwen3_vl_text",
    hf_class="Qwen3VLForConditionalGeneration",
    defaults={
        "max_position_embeddings": 128000,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    gguf=None,
)
