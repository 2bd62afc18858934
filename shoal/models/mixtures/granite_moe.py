"""Granite 3 with experts in all layers, whose matrices are stacked, and with or without a shared MLP."""

from __future__ import annotations

from dataclasses import replace

from shoal.kinds.experts import ExpertsKind, Router, SharedExpert
from shoal.model_config import ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.checkpoint_names import Stack, Stored
from shoal.models.configs.experts import with_experts
from shoal.models.configs.fields import ConfigFields
from shoal.models.families import granite


def read(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    shared = fields.count("shared_intermediate_size", 0, least=0)
    experts = ExpertsKind(
        fields.count("num_experts"),
        config.intermediate_size,
        Router(fields.count("num_experts_per_tok"), scores="chosen"),
        shared=SharedExpert(shared) if shared else None,
    )
    return with_experts(granite.read(config, fields), fields, experts)


TENSORS: dict[str, Stored] = {
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.router": "mlp.gate",  # a trainer's, as the experts' next
    "block_sparse_moe.experts": "mlp.experts",
    "block_sparse_moe.input_linear": Stack(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
    "block_sparse_moe.output_linear": Stack(("mlp.experts.{}.down_proj",)),
    "shared_mlp.input_linear": Stack(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
    "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
}
PLAIN = Architecture(
    name="granitemoe",
    hf_class="GraniteMoeForCausalLM",
    defaults={**granite.ARCHITECTURE.defaults, "num_experts": 8, "num_experts_per_tok": 2},
    read=read,
    renamed={"num_local_experts": "num_experts"},
    tensors=TENSORS,
)
SHARED = replace(PLAIN, name="granitemoeshared", hf_class="GraniteMoeSharedForCausalLM")
