"""MuseLayer: the decoder layer of Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.layers.norm_kinds import build_norm
from shoal.layers.parallel import TensorParallel
from shoal.model_config import LayerKind, ModelConfig
from shoal.models.decoder_layers.gated_sandwich_layer import GatedSandwichLayer


class MuseLayer(GatedSandwichLayer):
    """GatedSandwichLayer whose four norms are zero-centred, unlike the model's others, and have an epsilon of
    their own after attention and MLP."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        super().__init__(config, kind, tp, ops, backends)
        own, size = replace(config, norm="zero_centred"), config.hidden_size
        self.input_layernorm = build_norm(own, size, ops)
        self.post_attention_layernorm = build_norm(own, size, ops)
        self.pre_feedforward_layernorm = build_norm(own, size, ops)
        self.post_feedforward_layernorm = build_norm(own, size, ops)
        assert config.post_norm_eps is not None
        for norm in (self.post_attention_layernorm, self.post_feedforward_layernorm):
            norm.eps = config.post_norm_eps
