"""The supported architectures: one line each. docs/howto/model-architecture.md says how to add one."""

from __future__ import annotations

from shoal.models.architecture import Architecture
from shoal.models.families import (
    ernie4_5,
    gemma3,
    gemma4,
    glm,
    granite,
    granite_swa,
    hunyuan,
    llama,
    ministral3,
    mistral,
    muse_glimmer,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
    youtu,
)
from shoal.models.hybrids import bamba, granite_hybrid, kimi_linear, lfm2, nemotron_h, qwen3_5, qwen3_next
from shoal.models.mixtures import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite_moe,
    laguna,
    llama4,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)

ARCHITECTURES: tuple[Architecture, ...] = (
    llama.ARCHITECTURE,
    mistral.ARCHITECTURE,
    qwen2.ARCHITECTURE,
    qwen3.ARCHITECTURE,
    qwen3_moe.ARCHITECTURE,
    granite.ARCHITECTURE,
    gpt_oss.ARCHITECTURE,
    glm4_moe.ARCHITECTURE,
    laguna.ARCHITECTURE,
    llama4.ARCHITECTURE,
    mixtral.ARCHITECTURE,
    minimax_m2.ARCHITECTURE,
    qwen2_moe.ARCHITECTURE,
    granite_moe.PLAIN,
    granite_moe.SHARED,
    ernie4_5_moe.ARCHITECTURE,
    olmoe.ARCHITECTURE,
    olmo2.ARCHITECTURE,
    olmo3.ARCHITECTURE,
    glm.GLM,
    glm.GLM4,
    smollm3.ARCHITECTURE,
    ministral3.ARCHITECTURE,
    granite_swa.ARCHITECTURE,
    seed_oss.ARCHITECTURE,
    phi3.ARCHITECTURE,
    bamba.ARCHITECTURE,
    granite_hybrid.SPARSE,
    granite_hybrid.DENSE,
    hunyuan.ARCHITECTURE,
    ernie4_5.ARCHITECTURE,
    muse_glimmer.ARCHITECTURE,
    gemma3.GEMMA2,
    gemma3.GEMMA3,
    gemma4.ARCHITECTURE,
    gemma4.UNIFIED,
    deepseek_v2.ARCHITECTURE,
    deepseek_v3.ARCHITECTURE,
    glm4_moe_lite.ARCHITECTURE,
    mistral4.ARCHITECTURE,
    youtu.ARCHITECTURE,
    qwen3_next.ARCHITECTURE,
    qwen3_5.DENSE,
    qwen3_5.SPARSE,
    kimi_linear.ARCHITECTURE,
    lfm2.DENSE,
    lfm2.SPARSE,
    nemotron_h.ARCHITECTURE,
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
BY_HF_CLASS = {architecture.hf_class: architecture for architecture in ARCHITECTURES}
BY_GGUF = {
    name: architecture
    for architecture in ARCHITECTURES
    if architecture.gguf is not None
    for name in (architecture.gguf.architecture, *architecture.gguf.also_named)
}
