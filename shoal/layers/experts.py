"""A mixture of experts in place of an MLP: the router, the experts and their matrices on this rank, and the
shared expert, as the last of them or apart. It takes and returns what an MLP does (mlp.py)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from shoal.kernels.moe.mixture import NO_TENSORS, ExpertWeights, RouterTensors
from shoal.kernels.moe.reference import activate, mix_experts
from shoal.kernels.ops import Ops
from shoal.kinds.experts import ExpertsKind
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, copy_into, narrow
from shoal.layers.matrix import MatrixLayer
from shoal.layers.mlp import MLP
from shoal.layers.norm import RMSNorm
from shoal.layers.packed_weight import PackedWeight, check_stack, have_expert_kernels
from shoal.layers.parallel import TensorParallel
from shoal.layers.weight_format import PlainWeight
from shoal.model_config import ModelConfig

if TYPE_CHECKING:  # It needs Triton.
    from shoal.kernels.moe.packed_experts import PackedExperts


class ExpertMatrix(MatrixLayer):
    """Matrices of some experts, one expert's rows after another's: either gate and up, whose outputs are
    divided over the ranks, or down, whose inputs are. `stacked`: all experts share one matrix; an expert is a
    range of its rows."""

    def __init__(
        self,
        experts: range,
        names: tuple[str, ...],
        shape: tuple[int, int],
        tp: TensorParallel,
        ops: Ops,
        stacked: bool,
        biased: bool = False,
        joined: bool = False,
    ) -> None:
        """`names`: the matrices that an expert has here. `shape`: each one's in the checkpoint. `joined`: the
        last expert is the shared one."""
        self.split = 1 if names == ("down_proj",) else 0
        own = [size // tp.size if dim == self.split else size for dim, size in enumerate(shape)]
        super().__init__([own[0]] * (len(names) * len(experts)), own[1], ops)
        self.experts, self.names, self.shape, self.tp, self.stacked = experts, names, shape, tp, stacked
        self.joined = joined
        self.other: weakref.ref[ExpertMatrix] | None = None  # the stacked group has two
        self.bias = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if biased else None

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        parent = path.partition(".experts.")[0]
        for i, (expert, name) in enumerate(itertools.product(self.experts, self.names)):
            is_shared = self.joined and expert == self.experts[-1]
            own = f"{parent}.shared_experts.{name}" if is_shared else f"{parent}.experts.{expert}.{name}"
            yield CheckpointTensor(f"{own}.weight", self.shape, partial(self._load, i))
            if self.bias is not None:
                yield CheckpointTensor(f"{own}.bias", self.shape[:1], partial(self._load_bias, i))

    def _load(self, part: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), self.shape)
        length = self.shape[self.split] // self.tp.size
        self._load_part(part, narrow(tensor, self.split, self.tp.rank * length, length), name)

    def _load_bias(self, part: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), self.shape[:1])
        length = self.parts[part]
        shard = tensor if self.split else narrow(tensor, 0, self.tp.rank * length, length)
        copy_into(self._part_of(self.bias, part), shard, name)

    def _pack(self) -> None:
        """Packs a stacked matrix. Kernels of experts must take both of its group, so a matrix that they take
        waits for the other one."""
        if self.stacked:
            check_stack(self._quantized_parts.values())
        other = None if self.other is None else self.other()
        if other is None or isinstance(self.format, PackedWeight):
            super()._pack()
            return
        parts, per_expert = [*self._quantized_parts.values()], len(self.names)
        takes = have_expert_kernels(parts, per_expert, self.device, self.dtype)
        if takes and not other._waits() and not isinstance(other.format, PackedWeight):
            return
        takes = takes and other._waits()
        self._pack_waiting(takes)
        if other._waits():
            other._pack_waiting(takes)

    def _waits(self) -> bool:
        return len(self._quantized_parts) == len(self.parts)

    def _pack_waiting(self, for_experts: bool) -> None:
        self.per_expert = len(self.names) if for_experts else 0
        super()._pack()

    def finish(self) -> None:
        if self._waits() and not isinstance(self.format, PackedWeight):  # The group's other one is plain.
            self._pack_waiting(for_experts=False)
        super().finish()

    def stack(self) -> torch.Tensor | PackedExperts:
        """[experts, rows of one, inputs], or the packed matrix of all rows."""
        if isinstance(self.format, PackedWeight):
            return cast("PackedExperts", self.format.packed)
        return self.plain_weight().unflatten(0, (len(self.experts), -1))

    def rank_bias(self) -> torch.Tensor | None:
        """[rows of all experts]. None: there is none on this rank. Results of down are summed over the ranks,
        so one of them adds its bias."""
        return None if self.split and self.tp.rank else self.bias

    def stacked_bias(self) -> torch.Tensor | None:
        """[experts, rows of one]"""
        bias = self.rank_bias()
        return None if bias is None else bias.view(len(self.experts), -1)


class ExpertGroup(nn.Module):
    """The weights of some experts: w13, of each gate over up, or up alone, and w2, of each down. F is divided
    over the ranks."""

    def __init__(
        self, experts: range, hidden: int, kind: ExpertsKind, tp: TensorParallel, ops: Ops, stacked: bool
    ) -> None:
        super().__init__()
        up, down = (kind.intermediate_size, hidden), (hidden, kind.intermediate_size)
        first = ("gate_proj", "up_proj") if kind.activation.has_gate else ("up_proj",)
        rest = tp, ops, stacked, kind.biases, kind.router.joined
        self.w13 = ExpertMatrix(experts, first, up, *rest)
        self.w2 = ExpertMatrix(experts, ("down_proj",), down, *rest)
        if stacked:
            self.w13.other, self.w2.other = weakref.ref(self.w2), weakref.ref(self.w13)


class Experts(nn.Module):
    """All experts of a layer. They are one group, whose matrices one kernel multiplies, until `divide`
    splits it."""

    def __init__(self, hidden_size: int, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.kind, self.ops, self.stacked = kind, ops, True
        self.build = partial(ExpertGroup, hidden=hidden_size, kind=kind, tp=tp, ops=ops)
        self.groups = nn.ModuleList([self.build(range(kind.num_matrices), stacked=True)])

    def divide(self) -> None:
        """Makes each expert a group of its own. They are run one after the other: a CPU has no kernel for
        packed matrices of several."""
        self.stacked = False
        self.groups = nn.ModuleList(
            self.build(range(e, e + 1), stacked=False) for e in range(self.kind.num_matrices)
        )

    def mix(
        self,
        x_TD: torch.Tensor,
        router_logits_TE: torch.Tensor,
        residual_TD: torch.Tensor | None,
        tensors: RouterTensors = NO_TENSORS,
    ) -> torch.Tensor:
        """The sum of each token's best experts, by router weight. It is added to the residual in place, if
        there is one. `tensors`: the router's."""
        router, activation = self.kind.router, self.kind.activation
        if not self.stacked:
            return mix_experts(x_TD, router_logits_TE, router, tensors, self._run_expert, residual_TD)
        w13, w2 = self._group(0).w13, self._group(0).w2
        weights = ExpertWeights(w13.stack(), w2.stack(), w13.stacked_bias(), w2.stacked_bias())
        return self.ops.moe(x_TD, router_logits_TE, router, weights, activation, residual_TD, tensors)

    def _group(self, i: int) -> ExpertGroup:
        return cast(ExpertGroup, self.groups[i])

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        w13, w2 = self._group(expert).w13, self._group(expert).w2
        activation = self.kind.activation
        if activation.kind in ("clamped_swiglu", "relu2"):
            hidden = activate(w13.format.matmul(x, w13.bias), activation)
        else:
            hidden = w13.format.gated(x, w13.bias, activation.kind, None)
        return w2.format.matmul(hidden, w2.rank_bias())


class RouterLayer(Linear):
    """The logits of all experts, and the tensors of the rule by which logits choose. `name`: the checkpoint's
    of its matrix."""

    def __init__(
        self, hidden_size: int, kind: ExpertsKind, tp: TensorParallel, ops: Ops, name: str = "gate"
    ) -> None:
        router, outputs = kind.router, {name: kind.num_experts}
        if router.joined_gate:
            outputs["shared_expert_gate"] = 1
        super().__init__(hidden_size, outputs, tp, ops, split=None, bias=router.bias)
        self.router = router
        if router.float32:
            self.dtype = torch.float32
            rows = kind.num_experts + router.joined_gate
            self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=self.dtype), False)
            self.format = PlainWeight(ops, self.weight)
        self.correction, self.expert_scale = (
            nn.Parameter(torch.empty(kind.num_experts, dtype=torch.float32), False) if has else None
            for has in (router.correction, router.expert_scale)
        )

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        yield from super().checkpoint_tensors(path)
        vectors = {"e_score_correction_bias": self.correction, "per_expert_scale": self.expert_scale}
        for name, vector in vectors.items():
            if vector is not None:
                shape = tuple(vector.shape)
                yield CheckpointTensor(f"{path}.{name}", shape, partial(copy_into, vector))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self.router.float32:
            return self.ops.float_linear(x_TD, self.plain_weight(), self.bias)
        return super().forward(x_TD)

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor | None, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of residual + x, which becomes the residual, and its logits."""
        if x_TD is None and isinstance(self.format, PlainWeight):
            weights = norm.weight, norm.eps, self.plain_weight(), self.bias
            matmul = self.ops.norm_float_linear if self.router.float32 else self.ops.norm_linear
            return matmul(residual_TD, *weights)
        normed_TD = norm.add(x_TD, residual_TD)
        return normed_TD, self(normed_TD)

    @property
    def rule_tensors(self) -> RouterTensors:
        return RouterTensors(self.correction, self.expert_scale)


class MoE(nn.Module):
    """A router picks the best experts of each token; their outputs are summed by its weights. What a shared
    expert makes of the token is added to that; one as large as they are is one of them (ExpertsKind.join)."""

    joins = True

    def __init__(self, config: ModelConfig, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.config, self.kind, self.tp, self.ops = config, kind, tp, ops
        self.multiplier = config.residual_multiplier
        same = kind.activation.kind == config.activation and not config.mlp_bias
        self._build(kind.join() if self.joins and same else kind)

    def split_shared(self) -> None:
        """Builds the shared expert as an MLP again. A checkpoint may store it in another format than the
        other experts, and one matrix of all experts has one format."""
        self._build(self.kind)

    def _build(self, kind: ExpertsKind) -> None:
        config, tp, ops = self.config, self.tp, self.ops
        self.gate = RouterLayer(config.hidden_size, kind, tp, ops)
        self.experts = Experts(config.hidden_size, kind, tp, ops)
        self.shared_experts = self.shared_expert_gate = None
        if kind.shared is not None:
            own = replace(config, intermediate_size=kind.shared.intermediate_size)
            self.shared_experts = MLP(own, tp, ops)
            if kind.shared.gated:
                outputs = {"shared_expert_gate": 1}
                self.shared_expert_gate = Linear(config.hidden_size, outputs, tp, ops, split=None)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, logits_TE = self.gate.after_norm(norm, x_TD, residual_TD)
        tensors, adds = self.gate.rule_tensors, self.tp.size == 1 and self.multiplier == 1.0
        left_TD = None if self.shared_experts is None else self._share(normed_TD, residual_TD)
        out_TD = self.experts.mix(normed_TD, logits_TE, residual_TD if adds else None, tensors)
        if adds:
            return left_TD, residual_TD
        if self.multiplier != 1.0:
            out_TD.mul_(self.multiplier)
        return out_TD if left_TD is None else out_TD.add_(left_TD), residual_TD

    def whole(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """Returns the result for the normed input, summed over the ranks."""
        out_TD = self.experts.mix(normed_TD, self.gate(normed_TD), None, self.gate.rule_tensors)
        left_TD = None if self.shared_experts is None else self._share(normed_TD, out_TD)
        return self.tp.all_reduce(out_TD if left_TD is None else out_TD.add_(left_TD))

    def _share(self, normed_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor | None:
        """Adds the shared expert's result to the residual, and returns None; or returns this rank's part of
        what is to be added."""
        assert self.shared_experts is not None
        up, down = self.shared_experts.gate_up_proj, self.shared_experts.down_proj
        hidden_TF = up.gated(normed_TD, self.shared_experts.activation, reader=down)
        if self.shared_expert_gate is None:
            return down.add_to(hidden_TF, residual_TD)
        weight_T1 = torch.sigmoid(self.shared_expert_gate(normed_TD))
        return down.format.matmul(hidden_TF, None) * (weight_T1 * self.multiplier)
