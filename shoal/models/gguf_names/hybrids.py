"""Names in GGUF files of models with recurrent layers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, LINEAR

# gated delta nets, as Qwen3-Next and Qwen3.5 have them
DELTA_LAYERS = {"ssm_conv1d.weight": LINEAR, "attn_q.weight": FULL}
DELTA_TENSORS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_inner_size",
}
SHARED_EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
SHARED_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
MAMBA_TENSORS = {
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}

# Kimi Delta Attention
CHANNEL_DELTA_TENSORS = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


def value_heads(fields: ConfigFields) -> Mapping[str, Any]:
    """The size of a delta net's value heads."""
    return {"linear_value_head_dim": per_head(fields, "linear_inner_size", "linear_num_value_heads")}


def per_head(fields: ConfigFields, size: str, heads: str) -> int:
    """A head's share of a size. Raises CheckpointError unless it is a whole number."""
    whole, count = fields.count(size), fields.count(heads)
    if whole % count:
        raise CheckpointError(f"{fields.where}: {size} must be a multiple of {heads} {count}, got {whole}")
    return whole // count
