"""The module of a layer's mixer, and the shape by which layers share a backend, for each kind of mixer."""

from __future__ import annotations

from torch import nn

from shoal.attention.backend import AttentionShape, Backends
from shoal.kernels.ops import Ops
from shoal.kinds.latent import LatentKind
from shoal.kinds.recurrent import ChannelDeltaKind, DeltaKind, Mamba2Kind, ShortConvKind
from shoal.layers.attention import Attention, attention_shape
from shoal.layers.gated_attention import GatedAttention
from shoal.layers.latent import LatentAttention, latent_shape
from shoal.layers.parallel import TensorParallel
from shoal.layers.recurrent.delta_net import DeltaNet, KimiDelta
from shoal.layers.recurrent.mamba2 import Mamba2
from shoal.layers.recurrent.short_conv import ShortConv
from shoal.model_config import AttentionKind, MixerKind, ModelConfig


def mixer_shape(kind: AttentionKind | LatentKind, tp_size: int) -> AttentionShape | LatentKind:
    """The key of the layer's backend on each rank."""
    return latent_shape(kind, tp_size) if isinstance(kind, LatentKind) else attention_shape(kind, tp_size)


def build_mixer(
    config: ModelConfig,
    kind: MixerKind,
    tp: TensorParallel,
    ops: Ops,
    backends: Backends,
    attention_class: type[Attention] | None = None,
) -> nn.Module:
    """`attention_class`: of an AttentionKind, in place of Attention and GatedAttention."""
    if isinstance(kind, ChannelDeltaKind):
        return KimiDelta(config, kind, tp, ops)
    if isinstance(kind, DeltaKind):
        return DeltaNet(config, kind, tp, ops)
    if isinstance(kind, Mamba2Kind):
        return Mamba2(config, kind, tp, ops)
    if isinstance(kind, ShortConvKind):
        return ShortConv(config, kind, tp, ops)
    if isinstance(kind, LatentKind):
        return LatentAttention(config, kind, tp, ops, backends)
    attention = attention_class or (Attention if kind.gate is None else GatedAttention)
    return attention(config, kind, tp, ops, backends)
