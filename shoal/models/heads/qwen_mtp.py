"""The MTP head of Qwen3.5 (3.6 and 3.8 too) and of Qwen3-Next: a layer with attention as the target's, with
the target's experts if it has some."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.model_config import LayerKind, ModelConfig
from shoal.models.configs.fields import ConfigFields
from shoal.models.heads.mtp_family import MtpFamily


def layers(config: ModelConfig, fields: ConfigFields) -> tuple[LayerKind, ...]:
    return (next(kind for kind in reversed(config.layers) if kind.attention is not None),)


def names(config: ModelConfig, num_layers: int) -> Mapping[str, str]:
    """Returns the names of the first layer if there are several."""
    own = {"mtp.layers.0.": "layers.0."} if config.num_draft_layers > 1 else {"mtp.layers.": "layers."}
    return {**NAMES, **own}


NAMES = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "embedding_norm.",
    "mtp.pre_fc_norm_hidden.": "hidden_norm.",
    "mtp.norm.": "norm.",
    "mtp.embed_tokens.": "embed_tokens.",
}
FAMILY = MtpFamily(
    architectures=("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), names=names, layers=layers
)
