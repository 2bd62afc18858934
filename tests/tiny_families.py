"""Tiny random checkpoints of families whose layers differ from Llama's, or from one another, in the layouts that
their publishers use. tests/cpu/models/test_families.py tries each row; tests/tiny.py is their oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from shoal.kernels.quant.mxfp4_tensor import VALUES
from tests import tiny

WINDOW = 19  # shorter than most prompts, and not a multiple of a block
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = dict(rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=32)
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=14)
GEMMA3_ROPES = {
    SLIDING: dict(rope_type="default", rope_theta=10000.0),
    FULL: dict(rope_type="linear", rope_theta=1000000.0, factor=4.0),
}
# Changes a config and the tensors that transformers writes into what publishers write.
Publish = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def old_rope(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """`rope_theta` and `rope_scaling`, as configs had them before transformers 5."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if (kind := rope.pop("rope_type")) != "default":
        config["rope_scaling"] = {"type": kind, **rope}


def mxfp4_experts(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """gpt-oss' experts: 32 values of e2m1 in 16 bytes, the first in the low half, and a power of two for each
    32."""
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = tensors.pop(name).transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
        scaled = groups / torch.exp2(exponents).unsqueeze(-1)
        codes = (scaled.unsqueeze(-1) - torch.tensor(VALUES)).abs().argmin(-1)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)


def rotary_dim(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The share of each head that is rotated, as a size."""
    config["rope_parameters"].pop("partial_rotary_factor", None)
    old_rope(config, tensors)


EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
GRANITE = dict(
    attention_multiplier=0.21, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=0.4
)
GPT_OSS = dict(
    head_dim=16,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=WINDOW,
    rope_parameters=dict(YARN, rope_theta=150000.0, truncate=False),
)


def gemma4_names(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Gemma 4 names the heads of layers without a window in two fields; layers that read other layers' keys and
    values bring weights for their own, too."""
    text = config.get("text_config", config)
    full = next(iter(text.pop("per_layer_config").values()))
    text |= dict(global_head_dim=full["head_dim"], num_global_key_value_heads=full.get("num_key_value_heads"))
    for i in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        query = next(name for name in tensors if name.endswith(f"layers.{i}.self_attn.q_proj.weight"))
        rows = text["num_key_value_heads"] * (
            full["head_dim"] if text["layer_types"][i] == FULL else text["head_dim"]
        )
        for part in ("k_proj", "v_proj"):
            tensors[query.replace("q_proj", part)] = torch.full((rows, text["hidden_size"]), 9.0)


GEMMA4 = dict(
    head_dim=16,
    num_hidden_layers=6,
    sliding_window=WINDOW,
    final_logit_softcapping=9.0,
    hidden_size_per_layer_input=0,
)


def gemma3_ropes(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Gemma 3's first form: a theta for each kind of layer, and the pattern as a number."""
    ropes = config.pop("rope_parameters")
    config |= dict(rope_theta=ropes[FULL]["rope_theta"], rope_local_base_freq=ropes[SLIDING]["rope_theta"])
    config["rope_scaling"] = dict(rope_type="linear", factor=ropes[FULL]["factor"])
    config["sliding_window_pattern"] = 6
    del config["layer_types"]


def kimi_names(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"]["model_type"] = "kimi_k2"
    # transformers renames the vision tower's blocks when it writes, and the text model's layers with them
    for key in [key for key in tensors if key.startswith("language_model.model.blocks.")]:
        tensors[key.replace("blocks", "layers", 1)] = tensors.pop(key)


# name -> config class of transformers, what differs from tiny.COMMON, and the publisher's layout
FAMILIES: dict[str, tuple[str, dict[str, Any], Publish | None]] = {
    "seed-oss": ("SeedOssConfig", dict(head_dim=16, attention_out_bias=True), None),
    "olmo3": (
        "Olmo3Config",
        dict(
            num_hidden_layers=5,
            sliding_window=WINDOW,
            rope_parameters={
                SLIDING: dict(rope_type="default", rope_theta=500000.0),
                FULL: dict(YARN, rope_theta=500000.0, attention_factor=1.2),
            },
        ),
        None,
    ),
    "smollm3": ("SmolLM3Config", dict(num_hidden_layers=5, tie_word_embeddings=True), old_rope),
    "smollm3-window": (
        "SmolLM3Config",
        dict(use_sliding_window=True, sliding_window=WINDOW, no_rope_layers=[1, 0, 1], attention_bias=True),
        None,
    ),
    "ministral3": (
        "Ministral3Config",
        dict(
            head_dim=16,
            rope_parameters=dict(
                YARN, rope_theta=1e6, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5
            ),
        ),
        None,
    ),
    "ministral3-vision": (
        "Mistral3Config",
        dict(
            text_config=dict(
                model_type="ministral3",
                head_dim=16,
                tie_word_embeddings=True,
                rope_parameters=dict(
                    YARN, rope_theta=1e6, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1
                ),
            ),
            tie_word_embeddings=True,
            vision_config=dict(VISION, model_type="pixtral", head_dim=16, image_size=28),
            spatial_merge_size=1,
        ),
        None,
    ),
    "granite-swa": (
        "GraniteSWAConfig",
        dict(
            num_hidden_layers=5,
            sliding_window=WINDOW,
            layer_rope_theta=[0, 10000.0, 5000.0, 10000.0, 0],
            attention_multiplier=0.21,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=0.4,
            tie_word_embeddings=True,
        ),
        None,
    ),
    "gpt-oss": (
        "GptOssConfig",
        dict(GPT_OSS, hidden_size=64, intermediate_size=64, num_attention_heads=4, swiglu_limit=1.5),
        mxfp4_experts,
    ),
    "gpt-oss-plain": (
        "GptOssConfig",
        dict(GPT_OSS, num_hidden_layers=4, num_experts_per_tok=3, tie_word_embeddings=True),
        old_rope,
    ),
    "mixtral": (
        "MixtralConfig",
        dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=WINDOW),
        None,
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        dict(head_dim=16, num_local_experts=6, num_experts_per_tok=2, rotary_dim=8),
        rotary_dim,
    ),
    "qwen2-moe": ("Qwen2MoeConfig", dict(EXPERTS, shared_expert_intermediate_size=48), None),
    "granite-moe": (
        "GraniteMoeConfig",
        dict(GRANITE, num_local_experts=6, num_experts_per_tok=2, intermediate_size=32),
        None,
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        dict(
            GRANITE,
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=32,
            shared_intermediate_size=48,
        ),
        None,
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=32, num_hidden_layers=4),
        None,
    ),
    "olmoe": ("OlmoeConfig", dict(num_experts=6, num_experts_per_tok=2, intermediate_size=32), None),
    "laguna": (
        "LagunaConfig",
        dict(
            head_dim=16,
            num_hidden_layers=4,
            num_attention_heads_per_layer=[4, 8, 6, 4],
            sliding_window=WINDOW,
            layer_types=[FULL, SLIDING, SLIDING, FULL],
            rope_parameters={
                FULL: dict(YARN, rope_theta=500000.0, partial_rotary_factor=0.5),
                SLIDING: dict(rope_type="default", rope_theta=10000.0),
            },
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            moe_routed_scaling_factor=1.5,
            moe_router_logit_softcapping=2.0,
        ),
        None,
    ),
    "laguna-elements": (
        "LagunaConfig",
        dict(
            head_dim=16,
            gating="per-element",
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        None,
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        dict(
            head_dim=16,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            routed_scaling_factor=1.7,
            n_group=3,
            topk_group=2,
            use_qk_norm=True,
            attention_bias=True,
        ),
        old_rope,
    ),
}
FAMILIES["muse"] = (
    "MuseGlimmerConfig",
    dict(
        text_config=dict(head_dim=16, num_hidden_layers=6, sliding_window=WINDOW, output_multiplier=0.5),
        vision_config=dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
        out_hidden_size=32,
        projector_hidden_size=32,
    ),
    None,
)
FAMILIES["ernie"] = ("Ernie4_5Config", dict(head_dim=16, use_bias=True, tie_word_embeddings=True), None)
FAMILIES |= {
    "gemma2": (
        "Gemma2Config",
        dict(
            head_dim=16,
            num_hidden_layers=5,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
        ),
        None,
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(
            head_dim=16,
            num_hidden_layers=8,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            final_logit_softcapping=9.0,
            rope_parameters=GEMMA3_ROPES,
        ),
        gemma3_ropes,
    ),
    "gemma3-vision": (
        "Gemma3Config",
        dict(
            text_config=dict(
                head_dim=16,
                num_hidden_layers=6,
                sliding_window=WINDOW,
                final_logit_softcapping=9.0,
                tie_word_embeddings=True,
                rope_parameters=GEMMA3_ROPES,
            ),
            tie_word_embeddings=True,
            vision_config=dict(VISION, model_type="siglip_vision_model", image_size=28),
            mm_tokens_per_image=1,
        ),
        None,
    ),
}
DENSE_LATENTS = [
    "num_key_value_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
]
LATENTS = dict(
    num_key_value_heads=6,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=20,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
)
FAMILIES |= {
    "deepseek-v2": (
        "DeepseekV2Config",
        dict(
            LATENTS,
            q_lora_rank=None,
            n_shared_experts=2,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            rope_parameters=dict(YARN, rope_theta=10000.0, mscale=0.7, mscale_all_dim=0.5),
        ),
        None,
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(
            LATENTS,
            first_k_dense_replace=2,
            n_group=4,
            topk_group=2,
            attention_bias=True,
            rope_parameters=dict(YARN, rope_theta=10000.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        None,
    ),
    "youtu": (
        "YoutuConfig",
        # transformers fills the padding token's embedding with zeros when it loads this class
        dict({key: value for key, value in LATENTS.items() if key in DENSE_LATENTS}, pad_token_id=None),
        None,
    ),
    "glm4-flash": ("Glm4MoeLiteConfig", dict(LATENTS, tie_word_embeddings=True), None),
    "mistral4": (
        "Mistral4Config",
        dict(
            LATENTS,
            qk_nope_head_dim=8,
            n_group=2,
            topk_group=1,
            rope_parameters=dict(
                YARN, rope_theta=10000.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5
            ),
        ),
        None,
    ),
    "kimi-k25": (
        "Kimi_K25Config",
        dict(
            text_config=dict(
                LATENTS, model_type="deepseek_v3", first_k_dense_replace=1, n_group=1, topk_group=1
            ),
            vision_config=dict(VISION, pos_emb_height=4, pos_emb_width=4),
            projection_hidden_size=32,
        ),
        kimi_names,
    ),
    "glm4-flash-halves": ("Glm4MoeLiteConfig", dict(LATENTS, rope_interleave=False), None),
}
FAMILIES["phi3-window"] = ("Phi3Config", dict(sliding_window=WINDOW, num_key_value_heads=6), None)
FAMILIES["phi4-mini"] = (
    "Phi3Config",
    dict(
        hidden_size=96,
        tie_word_embeddings=True,
        original_max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            original_max_position_embeddings=32,
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
        ),
    ),
    old_rope,
)
FAMILIES["granite4-dense"] = (
    "GraniteMoeHybridConfig",
    dict(
        layer_types=[FULL] * 3,
        num_local_experts=0,
        shared_intermediate_size=80,
        attention_multiplier=0.21,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=0.4,
        mamba_n_heads=8,
        mamba_d_head=12,
    ),
    None,
)
FAMILIES["granite4-dense-rope"] = (
    "GraniteMoeHybridConfig",
    FAMILIES["granite4-dense"][1] | dict(position_embedding_type="rope", tie_word_embeddings=True),
    None,
)
FAMILIES["hunyuan"] = (
    "HunYuanDenseV1Config",
    dict(
        head_dim=16,
        rope_parameters=dict(rope_type="dynamic", alpha=100.0, rope_theta=10000.0, factor=1.0),
        tie_word_embeddings=True,
    ),
    None,
)
FAMILIES |= {
    "gemma4": (
        "Gemma4TextConfig",
        dict(GEMMA4, global_head_dim=32, attention_k_eq_v=True, num_global_key_value_heads=1),
        gemma4_names,
    ),
    # Regression: keys that are values had no bias, and such files were refused
    "gemma4-bias": (
        "Gemma4TextConfig",
        dict(
            GEMMA4,
            global_head_dim=32,
            attention_k_eq_v=True,
            attention_bias=True,
            num_global_key_value_heads=1,
            num_hidden_layers=2,
        ),
        gemma4_names,
    ),
    "gemma4-shared": (
        "Gemma4Config",
        dict(
            text_config=dict(
                GEMMA4,
                global_head_dim=32,
                num_hidden_layers=10,
                layer_types=[SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 2,
                num_kv_shared_layers=4,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=tiny.VOCAB,
                use_double_wide_mlp=True,
                tie_word_embeddings=True,
            ),
            tie_word_embeddings=True,
        ),
        gemma4_names,
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        dict(
            GEMMA4,
            global_head_dim=32,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        None,
    ),
}
FAMILIES["gemma4-unified"] = (
    "Gemma4UnifiedConfig",
    dict(
        text_config=dict(
            {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"},
            global_head_dim=32,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=8, output_proj_dims=tiny.COMMON["hidden_size"]),
        audio_config=dict(audio_embed_dim=16),
        tie_word_embeddings=True,
    ),
    gemma4_names,
)
TWO_HEAD_SIZES = ("gemma4", "gemma4-bias", "gemma4-shared", "gemma4-experts", "gemma4-unified")
FAMILIES["llama4-two-experts"] = (
    "Llama4TextConfig",
    dict(
        head_dim=16,
        num_hidden_layers=2,
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        no_rope_layers=[],
        attention_chunk_size=256,
    ),
    None,
)
FAMILIES["llama4"] = (
    "Llama4TextConfig",
    dict(
        head_dim=16,
        num_hidden_layers=5,
        no_rope_layers=[],
        intermediate_size_mlp=64,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW,
        floor_scale=16,
        attn_scale=0.5,
    ),
    None,
)


def rotary_dim(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """MiniMax M2's own word for the part of a head that is rotated."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rotary_dim"] = int(config["head_dim"] * rope["partial_rotary_factor"])


FAMILIES["minimax-rotary-dim"] = (
    "MiniMaxM2Config",
    dict(
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5),
    ),
    rotary_dim,
)
FAMILIES["glm"] = ("GlmConfig", dict(head_dim=16, tie_word_embeddings=True), old_rope)
FAMILIES["glm4"] = ("Glm4Config", dict(head_dim=16), None)


def new_prefixes(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Names as transformers 5 has them; it writes Mistral 3's older ones."""
    for name in [name for name in tensors if not name.startswith("lm_head")]:
        inner = name.removeprefix("model.").replace("language_model.model.", "language_model.")
        top = "" if inner.startswith("language_model.lm_head") else "model."
        tensors[top + (inner if top else inner.removeprefix("language_model."))] = tensors.pop(name)


FAMILIES["mistral-vision"] = (
    "Mistral3Config",
    dict(
        text_config=dict(model_type="mistral", head_dim=16, sliding_window=None),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16, image_size=28),
        spatial_merge_size=1,
    ),
    new_prefixes,
)
LINEAR = "linear_attention"
DELTA = dict(
    head_dim=16,
    num_hidden_layers=4,
    layer_types=[LINEAR, LINEAR, FULL, LINEAR],
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_conv_kernel_dim=4,
)
SHARED = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64
)
MROPE = dict(
    rope_type="default",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    mrope_section=[2, 1, 1],
    mrope_interleaved=True,
)
QWEN_VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=48,
    patch_size=4,
    num_position_embeddings=16,
)
QWEN3_VL_EXPERTS = dict(
    text_config=dict(EXPERTS, head_dim=16, rope_parameters=dict(rope_theta=1e6, mrope_section=[4, 2, 2])),
    vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0]),
)


def with_mtp(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A head that drafts tokens, which lies beside the model."""
    name = next(name for name in tensors if name.endswith("layers.2.self_attn.o_proj.weight"))
    tensors["mtp.layers.0.self_attn.o_proj.weight"] = tensors[name].clone()
    tensors["mtp.fc.weight"] = torch.zeros(48, 96)


def stacked_experts(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A layer's experts in two tensors, gate above up, as Qwen3.5 is published."""
    for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        prefix = name.removesuffix("0.gate_proj.weight")
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{i}.{part}.weight") for i in range(6)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}


FAMILIES["qwen3-next"] = ("Qwen3NextConfig", dict(**DELTA, **SHARED, decoder_sparse_step=2), with_mtp)
FAMILIES["qwen3.5"] = ("Qwen3_5TextConfig", dict(**DELTA, tie_word_embeddings=True), None)
FAMILIES["qwen3.5-vision"] = (
    "Qwen3_5Config",
    dict(text_config=dict(DELTA, rope_parameters=MROPE), vision_config=QWEN_VISION),
    with_mtp,
)
FAMILIES["qwen3.5-moe"] = (
    "Qwen3_5MoeConfig",
    dict(text_config=dict(DELTA, **SHARED, rope_parameters=MROPE), vision_config=QWEN_VISION),
    stacked_experts,
)
FAMILIES["qwen3.5-moe-text"] = ("Qwen3_5MoeTextConfig", dict(**DELTA, **SHARED), None)
MAMBA = dict(
    num_hidden_layers=4,
    layer_types=["mamba", "attention", "mamba", "mamba"],
    mamba_n_heads=8,
    mamba_d_head=12,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=16,
    shared_intermediate_size=64,
)


def old_layer_types(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Granite 4's words for its layers."""
    names = {LINEAR: "mamba", FULL: "attention"}
    config["layer_types"] = [names[kind] for kind in config["layer_types"]]
    config["time_step_limit"] = [0.0, float("inf")]


FAMILIES["granite4-mamba"] = (
    "GraniteMoeHybridConfig",
    dict(GRANITE, **MAMBA, num_local_experts=0, position_embedding_type="rope"),
    None,
)
FAMILIES["granite4-experts"] = (
    "GraniteMoeHybridConfig",
    dict(GRANITE, **MAMBA | dict(mamba_n_groups=1), num_local_experts=6, intermediate_size=32),
    old_layer_types,
)
FAMILIES["bamba"] = (
    "BambaConfig",
    dict(
        num_hidden_layers=4,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=16,
    ),
    None,
)
FAMILIES["kimi-linear"] = (
    "KimiLinearConfig",
    dict(
        num_hidden_layers=4,
        layer_types=[LINEAR, FULL, LINEAR, LINEAR],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_local_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        num_key_value_heads=6,
        linear_head_dim=12,
        linear_num_heads=4,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    None,
)
LFM2 = dict(num_hidden_layers=4, layer_types=["conv", FULL, "conv", "conv"], norm_eps=1e-5)
FAMILIES["lfm2"] = ("Lfm2Config", dict(**LFM2, block_multiple_of=32, tie_word_embeddings=True), None)
FAMILIES["lfm2-moe"] = (
    "Lfm2MoeConfig",
    dict(**LFM2, **EXPERTS, num_dense_layers=1, use_expert_bias=True, conv_L_cache=4),
    None,
)
NEMOTRON = dict(
    head_dim=16,
    ssm_state_size=8,
    mamba_num_heads=8,
    mamba_head_dim=12,
    n_groups=2,
    chunk_size=16,
    n_routed_experts=6,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=64,
    routed_scaling_factor=1.5,
    num_experts_per_tok=2,
    time_step_min=1e-6,  # its own chunks are clamped there, and steps of one token are not
)


def nemotron_pattern(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Layers as letters, as they were published first."""
    letters = {LINEAR: "M", FULL: "*", "moe": "E", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
    config["time_step_limit"] = [0.0, float("inf")]


FAMILIES["nemotron-h"] = (
    "NemotronHConfig",
    dict(**NEMOTRON, hybrid_override_pattern="M-*EM"),
    nemotron_pattern,
)
FAMILIES["nemotron-latent"] = (
    "NemotronHConfig",
    dict(**NEMOTRON, hybrid_override_pattern="ME*M-", moe_latent_size=24),
    None,
)


def gelu(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The name of the activation in Gemma's first configs, which stands for its approximation."""
    config["hidden_act"] = "gelu"


def letters(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """EXAONE's layers with and without windows as letters, which its layer_types repeat."""
    config["sliding_window_pattern"] = "LLLG"


def first_spelling(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["architectures"] = ["ExaoneMoEForCausalLM"]


def numbers_by_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Hunyuan-A13B's numbers of each layer."""
    config["moe_topk"] = [config["moe_topk"]] * config["num_hidden_layers"]


def flat_text(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Qwen2-VL's published config, which has the text model's fields beside the others, and its names."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key not in ("model_type", "layer_types")}
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = dict(type="mrope", mrope_section=rope["mrope_section"])
    for key in [key for key in tensors if "language_model." in key]:
        tensors[key.replace("language_model.", "")] = tensors.pop(key)


def turned_experts(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Qwen3-VL's experts as they are published, a row for each input."""
    for key in [key for key in tensors if ".experts." in key]:
        tensors[key] = tensors[key].transpose(1, 2)


def with_draft_layer(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A layer behind the last one, which drafts tokens, and which the config does not mention."""
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(config["hidden_size"], 2 * config["hidden_size"])


def untold_tie(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A multimodal config that leaves it to its class whether the head is tied."""
    del config["tie_word_embeddings"]


GLM_ROPE = dict(rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0])
GLM_VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    out_hidden_size=48,
    patch_size=4,
    image_size=16,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
# Experts by the names that DeepSeek's models and those after it have.
ROUTED = dict(
    head_dim=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.7,
    n_group=4,
    topk_group=2,
)
FAMILIES |= {
    "cwm": (
        "CwmConfig",
        dict(head_dim=16, num_hidden_layers=5, sliding_window=WINDOW, rope_parameters=LLAMA3),
        old_rope,
    ),
    "ministral": (
        "MinistralConfig",
        dict(head_dim=16, layer_types=[FULL, SLIDING, SLIDING], sliding_window=WINDOW),
        None,
    ),
    "gemma": ("GemmaConfig", dict(head_dim=16, num_key_value_heads=1, tie_word_embeddings=True), gelu),
    "arcee": ("ArceeConfig", dict(attention_bias=True, mlp_bias=True), None),
    "exaone4": (
        "Exaone4Config",
        dict(num_hidden_layers=5, sliding_window=WINDOW, rope_parameters=LLAMA3),
        letters,
    ),
    "exaone4-full": ("Exaone4Config", dict(sliding_window=None, layer_types=[FULL] * 3), None),
    "exaone-moe": (
        "ExaoneMoeConfig",
        dict(
            head_dim=16,
            num_hidden_layers=5,
            sliding_window=WINDOW,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=2,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
        ),
        first_spelling,
    ),
    "dots1": (
        "Dots1Config",
        dict(
            ROUTED, sliding_window=WINDOW, max_window_layers=1, first_k_dense_replace=1, norm_topk_prob=True
        ),
        None,
    ),
    "solar-open": ("SolarOpenConfig", dict(ROUTED, attention_bias=True), None),
    "granite-moe-swa": (
        "GraniteMoeSWAConfig",
        dict(
            GRANITE,
            num_hidden_layers=5,
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=32,
            shared_intermediate_size=48,
            sliding_window=WINDOW,
            layer_rope_theta=[0, 10000.0, 5000.0, 10000.0, 0],
        ),
        None,
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        dict(
            head_dim=16,
            intermediate_size=32,
            num_experts=6,
            moe_topk=2,
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=50.0),
        ),
        numbers_by_layer,
    ),
    "hunyuan3": (
        "HYV3Config",
        dict(EXPERTS, head_dim=16, num_shared_experts=2, attention_bias=True),
        with_draft_layer,
    ),
    "mellum": (
        "MellumConfig",
        dict(
            EXPERTS,
            head_dim=16,
            layer_types=[SLIDING, FULL, SLIDING],
            mlp_layer_types=["dense", "sparse", "sparse"],
            sliding_window=WINDOW,
            rope_parameters={
                SLIDING: dict(rope_type="default", rope_theta=10000.0),
                FULL: dict(YARN, rope_theta=500000.0),
            },
        ),
        None,
    ),
    "trinity": (
        "AfmoeConfig",
        dict(
            EXPERTS,
            head_dim=16,
            num_hidden_layers=5,
            num_shared_experts=2,
            num_dense_layers=2,
            route_scale=1.7,
            sliding_window=WINDOW,
            mup_enabled=True,
        ),
        None,
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        dict(
            text_config=dict(rope_parameters=dict(rope_theta=10000.0, mrope_section=[1, 1, 2])),
            vision_config=dict(depth=1, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2),
        ),
        flat_text,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        dict(
            text_config=dict(rope_parameters=dict(rope_theta=10000.0, mrope_section=[1, 1, 2])),
            vision_config=dict(QWEN_VISION, fullatt_block_indexes=[0]),
        ),
        None,
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        dict(
            text_config=dict(head_dim=16, rope_parameters=dict(rope_theta=1e6, mrope_section=[4, 2, 2])),
            vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0]),
            tie_word_embeddings=True,
        ),
        None,
    ),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", QWEN3_VL_EXPERTS, turned_experts),
    "qwen3-vl-moe-saved": ("Qwen3VLMoeConfig", QWEN3_VL_EXPERTS, None),
    "exaone4.5": (
        "Exaone4_5_Config",
        dict(
            text_config=dict(
                model_type="exaone4", head_dim=16, layer_types=[SLIDING, SLIDING, FULL], sliding_window=WINDOW
            ),
            vision_config=dict(QWEN_VISION, num_key_value_heads=2, fullatt_block_indexes=[0]),
        ),
        None,
    ),
    "internvl": (
        "InternVLConfig",
        dict(
            text_config=dict(model_type="qwen3", head_dim=16),
            vision_config=dict(VISION, image_size=[28, 28], patch_size=[14, 14]),
            tie_word_embeddings=True,
        ),
        untold_tie,
    ),
    "lfm2-vl": (
        "Lfm2VlConfig",
        dict(
            text_config=dict(LFM2, model_type="lfm2", block_multiple_of=32),
            vision_config=dict(VISION, model_type="siglip2_vision_model", num_patches=16),
            tie_word_embeddings=True,
        ),
        untold_tie,
    ),
    "cohere": ("CohereConfig", dict(layer_norm_eps=1e-3, logit_scale=0.4, tie_word_embeddings=True), None),
    "cohere2": (
        "Cohere2Config",
        dict(
            num_hidden_layers=5,
            layer_norm_eps=1e-3,
            logit_scale=0.4,
            attention_bias=True,
            sliding_window=WINDOW,
        ),
        None,
    ),
    "glm4v": (
        "Glm4vConfig",
        dict(text_config=dict(rope_parameters=GLM_ROPE), vision_config=GLM_VISION),
        None,
    ),
    "glm4v-moe": (
        "Glm4vMoeConfig",
        dict(
            text_config=dict(ROUTED, rope_parameters=dict(GLM_ROPE, mrope_section=[1, 1, 2])),
            vision_config=GLM_VISION,
        ),
        None,
    ),
}
# Models with recurrent layers: a prefix is found where a state was kept alone.
RECURRENT = (
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-vision",
    "qwen3.5-moe",
    "qwen3.5-moe-text",
    "granite4-mamba",
    "granite4-experts",
    "bamba",
    "kimi-linear",
    "lfm2",
    "lfm2-moe",
    "lfm2-vl",
    "nemotron-h",
    "nemotron-latent",
)
# Models whose oracle computes shorter sequences otherwise: the fewest tokens of a prompt.
LEAST_TOKENS = {"phi4-mini": 40}


def make_config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    kind, own, _ = FAMILIES[name]
    if "text_config" not in own:
        return getattr(transformers, kind)(**tiny.COMMON | dict(pad_token_id=0) | own | changes)
    top = {key: tiny.COMMON[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
    text = tiny.COMMON | dict(pad_token_id=0) | own["text_config"] | changes
    return getattr(transformers, kind)(**top | own | {"text_config": text})


@torch.no_grad()
def widen(model: torch.nn.Module) -> None:
    """Fills the weights such that greedy decoding is decisive, and that each piece shows: a sink, a gate, a norm's
    "1 +", a correction bias."""
    text = model.config.get_text_config()
    tied = getattr(text, "tie_word_embeddings", model.config.tie_word_embeddings)
    embedding = 0.6 / getattr(text, "embedding_multiplier", 1.0)
    if text.model_type.startswith("gemma"):
        embedding /= text.hidden_size**0.5
    elif tied:
        embedding /= 3  # or each token would be followed by itself
    for key, weight in model.state_dict().items():
        if "norm" in key and weight.dim() == 1:
            centre = 0.0 if weight.any() else 1.0  # such a norm multiplies by 1 + weight
            weight.uniform_(0.6, 1.8).sub_(centre)
        elif key.endswith("A_log"):
            weight.uniform_(math.log(0.003), math.log(0.3))  # such states forget slowly
        elif "conv" in key and weight.dim() == 3:
            weight.normal_(0, 0.7)
        elif key.endswith("sinks"):
            weight.normal_(0, 2.0)
        elif key.endswith(("correction_bias", "expert_bias")):
            weight.uniform_(-0.3, 0.3)
        elif key.endswith(".D"):
            weight.uniform_(0.6, 1.4)
        elif key.endswith("dt_bias"):
            weight.uniform_(-1.0, 1.0)
        elif key.endswith(("layer_scalar", "per_expert_scale", "router.scale")):
            weight.uniform_(0.6, 1.4)
        elif key.endswith("bias"):
            weight.normal_(0, 0.3)
        elif "embed" in key or "lm_head" in key:
            weight.normal_(0, embedding if "embed" in key or tied else 0.6)
        elif weight.dim() > 1 and weight.is_floating_point():
            weight.normal_(0, 1.8 / max(weight.shape[-1], 1) ** 0.5)
    model.tie_weights()


def write_family(root: Path, name: str, **changes: Any) -> Path:
    """Writes checkpoint `name` under `root` (once) and returns its folder. `changes` go over its text config's
    fields."""
    folder = root / "-".join([name, *(f"{key}={value}" for key, value in changes.items())])
    if (folder / "complete").exists():
        return folder
    config = make_config(name, **changes)
    torch.manual_seed(sum(map(ord, name)))
    model = tiny.model_class(config)(config).float()
    widen(model)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    if (publish := FAMILIES[name][2]) is not None:
        published = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        publish(published, tensors)
        contiguous = {key: weight.contiguous() for key, weight in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(published))
    (folder / "complete").touch()
    return folder
