"""Names in GGUF files of the mixtures that have shared experts, and whose last layers draft tokens: GLM and
DeepSeek. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.models.config_fields import ConfigFields

EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    # of layers that draft, which are left out
    **{f"nextn.{part}": part for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
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
    "nextn_predict_layers": "num_nextn_predict_layers",
}


def without_draft_layers(fields: ConfigFields) -> Mapping[str, Any]:
    """A file counts the layers that draft among its blocks."""
    num_drafts = fields.count("num_nextn_predict_layers", 0, least=0)
    return {
        "num_hidden_layers": fields.count("num_hidden_layers") - num_drafts,
        "num_nextn_predict_layers": num_drafts,
    }
