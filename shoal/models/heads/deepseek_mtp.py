"""The MTP head of DeepSeek V3, and of GLM-4.5, 4.6, 4.7 and 4.7-Flash: one more layer after the target's
last one, which has the head's other tensors, too."""

from __future__ import annotations

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.heads.mtp_family import MtpFamily, one_more_layer


def layers(config: ModelConfig, fields: ConfigFields) -> tuple[LayerKind, ...]:
    return config.layers[-1:]


FAMILY = MtpFamily(
    architectures=("deepseek_v3", "glm4_moe", "glm4_moe_lite"), names=one_more_layer, layers=layers
)
