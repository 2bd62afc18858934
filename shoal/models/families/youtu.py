"""Youtu-LLM: latent attention in dense layers."""

from __future__ import annotations

from shoal.models.architecture import Architecture
from shoal.models.configs.latent import with_latents

ARCHITECTURE = Architecture(
    name="youtu",
    hf_class="YoutuForCausalLM",
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    read=with_latents,
)
