"""Phi-3, Phi-4 and Phi-4-mini: Llama whose files hold q, k and v as one matrix, and gate and up as another.
Phi-3 has a window in all layers, and models for long contexts have longrope."""

from __future__ import annotations

from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack, query_key_value
from shoal.models.families import mistral

ARCHITECTURE = Architecture(
    name="phi3",
    hf_class="Phi3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "partial_rotary_factor": 1.0,
    },
    read=mistral.read,
    tensors={
        "self_attn.qkv_proj": Stack(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), runs=query_key_value
        ),
        "mlp.gate_up_proj": Stack(("mlp.gate_proj", "mlp.up_proj")),
    },
    gguf=GGUFNames(
        "phi3",
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"rope.scaling.original_context_length": "original_max_position_embeddings"},
    ),
)
