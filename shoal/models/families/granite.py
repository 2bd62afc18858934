"""Granite 3: Llama with four multipliers, of the embeddings, of the attention scores, of what is added to the
residual, and of the logits."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import llama


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    config = llama.read(config, fields).with_attention(scale=fields.number("attention_multiplier"))
    if not fields.flag("rope_finetuned", True):  # GGUF's sign of Granite 4 without rope
        config = config.with_attention(rope=None)
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier"),
        residual_multiplier=fields.number("residual_multiplier"),
        logits_scaling=fields.number("logits_scaling"),
    )


GGUF_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.scaling.finetuned": "rope_finetuned",
}
ARCHITECTURE = Architecture(
    name="granite",
    hf_class="GraniteForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    read=read,
    gguf=GGUFNames(
        "granite", keys=GGUF_KEYS, refused={"expert_count": "a mixture of experts"}, interleaved=True
    ),
)
