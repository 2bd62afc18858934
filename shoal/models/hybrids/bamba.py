"""Bamba: Mamba-2, in some layers attention that rotates half of each head, and MLPs."""

from __future__ import annotations

from shoal.errors import CheckpointError
from shoal.models.architecture import Architecture
from shoal.models.checkpoint_names import Stack
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, LINEAR
from shoal.models.configs.recurrent import granite_mamba_layer, parts_of_mamba
from shoal.models.families import llama
from shoal.models.hybrids.qwen3_next import hybrid_layer

PARTIAL = 0.5  # the share of a head that rotates


def layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    given = fields.get("attn_layer_indices") or []
    if not isinstance(given, list) or not all(type(i) is int and 0 <= i < num_layers for i in given):
        raise CheckpointError(
            f"{fields.where}: attn_layer_indices must be layers from 0 to {num_layers - 1}, got {given!r:.80}"
        )
    return tuple(FULL if i in given else LINEAR for i in range(num_layers))


ARCHITECTURE = Architecture(
    name="bamba",
    hf_class="BambaForCausalLM",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": PARTIAL,
        "eos_token_id": 2,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    read=llama.read,
    layer_types=layer_types,
    other_layers={LINEAR: granite_mamba_layer},
    # whatever a config says, but for its rope_parameters
    said_otherwise=lambda fields: {"partial_rotary_factor": PARTIAL},
    renamed={"layers_block_type": "layer_types"},
    tensors={
        "mamba.in_proj": Stack(
            tuple(f"mamba.in_proj_{part}" for part in ("z", "x", "b", "c", "dt")), runs=parts_of_mamba
        ),
        "pre_ff_layernorm": "post_attention_layernorm",
        "feed_forward": "mlp",
    },
    layer_class=hybrid_layer,
)
