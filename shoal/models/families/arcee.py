"""Arcee AFM: Llama with an MLP without a gate, of the square of relu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.configs.fields import ConfigFields, check_fixed
from shoal.models.families import llama

if TYPE_CHECKING:
    from torch import nn


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    return replace(llama.read(config, fields), activation="relu2")


def _activation(fields: ConfigFields) -> Mapping[str, Any]:
    """Takes relu2 out of the fields, as a name of the activation of MLPs with gates."""
    check_fixed(fields, {"hidden_act": "relu2"})
    return {"hidden_act": None}


def layer_class() -> type[nn.Module]:
    from shoal.models.decoder_layers.hybrid_layer import HybridLayer

    return HybridLayer


ARCHITECTURE = Architecture(
    name="arcee",
    hf_class="ArceeForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 128001,
    },
    read=read,
    said_otherwise=_activation,
    layer_class=layer_class,
    gguf=GGUFNames("arcee", interleaved=True),
)
