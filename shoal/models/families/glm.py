"""GLM-4, dense: half of each head is rotated, in pairs of neighbouring numbers, and gate and up are one
matrix. The models of 2025 (GLM-4-0414) have norms after attention and MLP, too, and so has the text model of
GLM-4.1V."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import gemma3


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(config, qkv_bias=fields.flag("attention_bias"))


GLM = Architecture(
    name="glm",
    hf_class="GlmForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    read=read,
    tensors={"mlp.gate_up_proj": Stack(("mlp.gate_proj", "mlp.up_proj"))},
    interleaved=True,
    gguf=GGUFNames("chatglm", tensors={"ffn_up": "mlp.gate_up_proj"}),
)
GLM4 = replace(
    GLM,
    name="glm4",
    hf_class="Glm4ForCausalLM",
    tensors={
        **GLM.tensors,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    layer_class=gemma3.layer_class,
    gguf=GGUFNames(
        "glm4",
        tensors={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        # llama.cpp's converter puts rows of q and k in halves then
        refused={"rope.dimension_sections": "GLM-4.1V or GLM-OCR"},
    ),
)
GLM4V = replace(
    GLM4,
    name="glm4v_text",
    hf_class="Glm4vForConditionalGeneration",
    defaults={
        **GLM.defaults,
        "max_position_embeddings": 32768,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "eos_token_id": None,
    },
    gguf=None,
)
