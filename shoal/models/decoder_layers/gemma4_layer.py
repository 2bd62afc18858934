"""Gemma4Layer: Gemma 3's layer, in some models with experts next to the MLP and per-layer embeddings after
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from shoal.attention.backend import Backends
from shoal.kernels.ops import Ops
from shoal.kinds.experts import ExpertsKind
from shoal.layers.experts import Experts, RouterLayer
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, copy_into
from shoal.layers.norm import RMSNorm
from shoal.layers.norm_kinds import FloatNorm, add_normed, build_norm
from shoal.layers.parallel import TensorParallel
from shoal.layers.per_layer import PerLayerInput
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder_layers.sandwich_layer import SandwichLayer


class KeyIsValue(Linear):
    """The matmul for q, k and v of a layer whose values are its keys before their norm and rotation. The
    checkpoint's matrix and bias of k are held twice, so that k and v are one more pair of heads' rows as
    everywhere."""

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        tensors = [*super().checkpoint_tensors(path)]  # q, k, v: each a matrix, and perhaps a bias
        per_part = len(tensors) // 3
        yield from tensors[:per_part]
        for key, value in zip(tensors[per_part : 2 * per_part], tensors[2 * per_part :]):
            yield key._replace(load=partial(self._load_both, key, value))

    def _load_both(self, key: CheckpointTensor, value: CheckpointTensor, tensor: Loaded, name: str) -> None:
        key.load(tensor, name)
        value.load(tensor, name)


class Scalar(LoadingLayer):
    """A factor of the layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(path, (1,), partial(copy_into, self.value))


class RouterNorm(FloatNorm):
    """The norm of the router's input: the checkpoint's scale is for a result of length 1."""

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        own = f"{path.rpartition('.')[0]}.router.scale"
        yield CheckpointTensor(own, tuple(self.weight.shape), self._load)

    def _load(self, tensor: Loaded, name: str) -> None:
        super()._load(tensor, name)
        self.weight.data.mul_(len(self.weight) ** -0.5)


class ExpertsBeside(nn.Module):
    """A mixture of experts whose result is normed and added to the MLP's, before the norm of the sum. Its
    norms are parts of kernels that norm for the MLP too."""

    def __init__(self, config: ModelConfig, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.tp, size = tp, config.hidden_size
        self.router_norm = RouterNorm(size, config.rms_norm_eps, ops)
        self.router = RouterLayer(size, kind, tp, ops, name="router.proj")
        self.experts = Experts(size, kind, tp, ops)
        self.post_feedforward_layernorm_1 = build_norm(config, size, ops)
        self.post_feedforward_layernorm_2 = build_norm(config, size, ops)
        self.pre_feedforward_layernorm_2 = build_norm(config, size, ops)

    def forward(self, routed_TD: torch.Tensor, normed_TD: torch.Tensor) -> torch.Tensor:
        """Returns what experts make of `normed_TD`. `routed_TD` is the router's norm of the residual,
        `normed_TD` the experts'."""
        logits_TE = self.router(routed_TD)
        return self.tp.all_reduce(self.experts.mix(normed_TD, logits_TE, None, self.router.rule_tensors))


class Gemma4Layer(SandwichLayer):
    """SandwichLayer, with what its file's first line says, and a factor of the result."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, tp: TensorParallel, ops: Ops, backends: Backends
    ) -> None:
        mixer = kind.mixer
        assert isinstance(mixer, AttentionKind)
        own = replace(config, intermediate_size=kind.intermediate_size or config.intermediate_size)
        super().__init__(own, kind, tp, ops, backends)
        if mixer.v_is_k:
            merged = self.self_attn.qkv_proj
            self.self_attn.qkv_proj = KeyIsValue(
                config.hidden_size,
                merged.full_parts,
                tp,
                ops,
                split="columns",
                bias=config.qkv_bias,
                replicas=merged.replicas,
            )
        self.ops = ops
        self.beside = None if kind.experts is None else ExpertsBeside(config, kind.experts, tp, ops)
        self.per_layer = PerLayerInput(config, tp, ops) if config.per_layer_size else None
        self.layer_scalar = Scalar()

    def forward(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        step: CacheStep,
        embeddings_TP: torch.Tensor | None = None,
    ) -> Stream:
        """Takes and returns what DecoderLayer.forward does. `embeddings_TP`: the layer's own of each
        token."""
        _, residual = super().forward(x_TD, residual_TD, step)
        if self.per_layer is not None and embeddings_TP is not None and len(residual):
            own_TP = embeddings_TP if step.select_S is None else embeddings_TP[step.select_S]
            added_TD = self.per_layer(residual, own_TP)
            self._join(added_TD, None, self.per_layer.post_per_layer_input_norm, residual, is_last=True)
        return None, residual

    def feed_forward(self, attended_TD: torch.Tensor, residual_TD: torch.Tensor) -> None:
        beside, before, after = self.beside, self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        if beside is None:
            normed = add_normed(attended_TD, self.post_attention_layernorm, residual_TD, before)
            hidden, mixed = self.mlp.whole(cast(torch.Tensor, normed)), None
        else:
            following = before.weight, beside.router_norm.weight, beside.pre_feedforward_layernorm_2.weight
            normed, *inner = self.ops.fork_norms(
                attended_TD, self.post_attention_layernorm.weight, residual_TD, following, before.eps
            )
            hidden, mixed = self.mlp.whole(normed), beside(*inner)
        self._join(hidden, mixed, after, residual_TD, is_last=self.per_layer is None)

    def _join(
        self,
        x_TD: torch.Tensor,
        beside_TD: torch.Tensor | None,
        norm: RMSNorm,
        residual_TD: torch.Tensor,
        is_last: bool,
    ) -> None:
        """residual += norm(y), where y is x or the sum of the norms of both; times the factor if it
        `is_last`."""
        beside, factor = self.beside, self.layer_scalar.value if is_last else None
        branches: tuple[torch.Tensor, ...] = ()
        if beside is not None and beside_TD is not None:
            own, other = beside.post_feedforward_layernorm_1, beside.post_feedforward_layernorm_2
            branches = own.weight, other.weight
        self.ops.join_norms(x_TD, beside_TD, branches, norm.weight, residual_TD, norm.eps, factor)
