"""Names in GGUF files of Gemma, and the layers of Gemma 4 by their metadata. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.models.architecture import GGUFNames
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.configs.layers import FULL, SLIDING

# the norms before and after attention and MLP
SANDWICH_TENSORS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def fields_of_layers(fields: ConfigFields) -> Mapping[str, Any]:
    """Fields of config.json that a file says layer by layer. The file's head_dim is for layers without a
    window, and so is its rope."""
    rope = ConfigFields(fields.get("rope_parameters"), f"{fields.where}: rope")
    check_fixed(rope, {"rope_type": "none"})  # scaled frequencies are not divided in addition
    full = fields.count("head_dim")
    sliding = fields.count("sliding_head_dim", full)
    types = fields.each("layer_types", fields.count("num_hidden_layers"))
    heads, num_shared = _kv_heads(fields), fields.count("num_kv_shared_layers", 0, least=0)
    rotated = fields.count("sliding_rotary_dim", sliding) / sliding
    return {
        **_widths(fields, num_shared),
        "head_dim": sliding,
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(i): {
                "head_dim": sliding if kind.get("layer_types") == SLIDING else full,
                "num_key_value_heads": heads[i],
            }
            for i, kind in enumerate(types)
        },
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": fields.count("hidden_size_per_layer_input", 0, least=0),
        "enable_moe_block": bool(fields.count("num_experts", 0, least=0)),
        "rope_parameters": {
            SLIDING: {"rope_theta": fields.get("sliding_theta"), "partial_rotary_factor": rotated},
            FULL: {"rope_theta": rope.get("rope_theta"), "partial_rotary_factor": 1.0},
        },
    }


def _kv_heads(fields: ConfigFields) -> list[int]:
    """The number of kv heads of each layer."""
    given, num_layers = fields.get("num_key_value_heads"), fields.count("num_hidden_layers")
    if isinstance(given, list):
        return [each.count("num_key_value_heads") for each in fields.each("num_key_value_heads", num_layers)]
    return [fields.count("num_key_value_heads")] * num_layers


def _widths(fields: ConfigFields, num_shared: int) -> Mapping[str, Any]:
    """The width of MLPs, which may be twice as much in layers that read the keys and values of others."""
    given, num_layers = fields.get("intermediate_size"), fields.count("num_hidden_layers")
    if not isinstance(given, list):
        return {}
    num_own = max(num_layers - num_shared, 0)
    widths = [each.count("intermediate_size") for each in fields.each("intermediate_size", num_layers)]
    width, last = widths[0], widths[-1]
    if last not in (width, 2 * width) or widths != [width] * num_own + [last] * (num_layers - num_own):
        raise CheckpointError(
            f"{fields.where}: intermediate_size must be one number for the first {num_own} layers, and that "
            f"number or twice as much for the {num_layers - num_own} after them, got {given!r:.80}"
        )
    return {"intermediate_size": width, "use_double_wide_mlp": last != width}


GEMMA4 = GGUFNames(
    "gemma4",
    tensors={
        **SANDWICH_TENSORS,
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        **{
            f"ffn_{part}_exps": f"beside.experts.{{}}.{part}_proj"
            for part in ("gate_up", "gate", "up", "down")
        },
    },
    keys={
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "attention.key_length_swa": "sliding_head_dim",
        "rope.dimension_count_swa": "sliding_rotary_dim",
        "rope.freq_base_swa": "sliding_theta",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    derived=fields_of_layers,
    by_layer=("num_key_value_heads", "intermediate_size"),
    full_rope_factors=True,
)
