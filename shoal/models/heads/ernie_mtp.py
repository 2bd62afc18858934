"""The MTP head of ERNIE 4.5 with experts: a dense layer, whose output goes through the target's last norm."""

from __future__ import annotations

from dataclasses import replace

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.heads.mtp_family import MtpFamily


def layers(config: ModelConfig, fields: ConfigFields) -> tuple[LayerKind, ...]:
    return (replace(config.layers[-1], experts=None),)


NAMES = {
    "mtp_linear_proj.0.": "fc.",
    "mtp_emb_norm.0.": "embedding_norm.",
    "mtp_hidden_norm.0.": "hidden_norm.",
    "mtp_block.0.": "layers.0.",
}
FAMILY = MtpFamily(
    architectures=("ernie4_5_moe",),
    names=lambda config, num_layers: NAMES,
    layers=layers,
    shares_norm=True,
    gguf_names=None,
)
