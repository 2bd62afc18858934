"""Names of experts and routers in GGUF files, and of the latents of DeepSeek and GLM. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.models.configs.fields import ConfigFields

SIGMOID = 2  # as expert_gating_func says it
EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
EXPERT_KEYS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
# what llama.cpp takes where a file does not say it: its converter writes the first only if it is true
UNSAID = {"expert_weights_norm": False, "expert_weights_scale": 1.0, "leading_dense_block_count": 0}
LATENT_TENSORS = {
    **EXPERT_TENSORS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # weights/gguf/latents.py
    "attn_v_b": "self_attn.v_b_proj",
}
LATENT_KEYS = {
    **EXPERT_KEYS,
    "expert_gating_func": "expert_gating_func",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "key_length_mla",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
}


def latents(fields: ConfigFields) -> Mapping[str, Any]:
    """The fields of DeepSeek's models. The multiplier is a tenth of `mscale_all_dim`, which published models
    have for `mscale`, too, so that cosines and sines have no factor."""
    rotary, num_groups = fields.count("qk_rope_head_dim"), fields.count("n_group", 1)
    rope = dict(fields.get("rope_parameters"))
    rope.pop("attention_factor", None)
    if fields.get("yarn_log_multiplier") is not None:
        rope["mscale"] = rope["mscale_all_dim"] = 10 * fields.number("yarn_log_multiplier")
    softmax = {"topk_method": "group_limited_greedy" if num_groups > 1 else "greedy"}
    return {
        **({} if fields.get("expert_gating_func") == SIGMOID else softmax),
        "rope_parameters": rope,
        "q_lora_rank": fields.get("q_lora_rank"),
        "qk_nope_head_dim": fields.count("key_length_mla") - rotary,
        "num_key_value_heads": fields.count("num_attention_heads"),
        "n_group": num_groups,
        "topk_group": fields.count("topk_group", 1),
    }
