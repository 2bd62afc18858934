"""A mixture of experts in place of an MLP: the router, the experts, and their matrices on this rank. It takes
and returns what an MLP does (mlp.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from shoal.kernels.moe.mixture import Activation, ExpertWeights, Router
from shoal.kernels.moe.reference import mix_experts
from shoal.kernels.ops import Ops
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, narrow
from shoal.layers.matrix import MatrixLayer
from shoal.layers.norm import RMSNorm
from shoal.layers.packed_weight import PackedWeight, check_stack
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ExpertsKind, ModelConfig

if TYPE_CHECKING:  # It needs Triton.
    from shoal.kernels.moe.packed_moe import PackedExperts


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
    ) -> None:
        """`names`: the matrices that an expert has here. `shape`: each one's in the checkpoint."""
        self.split = 0 if len(names) == 2 else 1
        own = [size // tp.size if dim == self.split else size for dim, size in enumerate(shape)]
        super().__init__([own[0]] * (len(names) * len(experts)), own[1], ops)
        self.experts, self.names, self.shape, self.tp, self.stacked = experts, names, shape, tp, stacked

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        own = f"{path.partition('.experts.')[0]}.experts"
        for i, (expert, name) in enumerate(itertools.product(self.experts, self.names)):
            yield CheckpointTensor(f"{own}.{expert}.{name}.weight", self.shape, partial(self._load, i))

    def _load(self, part: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), self.shape)
        length = self.shape[self.split] // self.tp.size
        self._load_part(part, narrow(tensor, self.split, self.tp.rank * length, length), name)

    def _pack(self) -> None:
        if self.stacked:
            check_stack(self._quantized_parts.values())
        super()._pack()

    def stack(self) -> torch.Tensor | PackedExperts:
        """[experts, rows of one, inputs], or the packed matrix of all rows."""
        if isinstance(self.format, PackedWeight):
            return cast("PackedExperts", self.format.packed)
        return self.plain_weight().unflatten(0, (len(self.experts), -1))


class ExpertGroup(nn.Module):
    """The weights of some experts: w13, of each gate over up, and w2, of each down. F is divided over the
    ranks."""

    def __init__(
        self, experts: range, hidden: int, size: int, tp: TensorParallel, ops: Ops, stacked: bool
    ) -> None:
        super().__init__()
        self.w13 = ExpertMatrix(experts, ("gate_proj", "up_proj"), (size, hidden), tp, ops, stacked)
        self.w2 = ExpertMatrix(experts, ("down_proj",), (hidden, size), tp, ops, stacked)


class Experts(nn.Module):
    """All experts of a layer. They are one group, whose matrices one kernel multiplies, until `divide`
    splits it."""

    def __init__(self, hidden_size: int, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.kind, self.ops, self.stacked = kind, ops, True
        self.build = partial(ExpertGroup, hidden=hidden_size, size=kind.intermediate_size, tp=tp, ops=ops)
        self.groups = nn.ModuleList([self.build(range(kind.num_experts), stacked=True)])

    def divide(self) -> None:
        """Makes each expert a group of its own. They are run one after the other: a CPU has no kernel for
        packed matrices of several."""
        self.stacked = False
        self.groups = nn.ModuleList(
            self.build(range(e, e + 1), stacked=False) for e in range(self.kind.num_experts)
        )

    def mix(
        self, x_TD: torch.Tensor, router_logits_TE: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum of each token's best experts, by router weight. It is added to the residual in place, if
        there is one."""
        router = Router(self.kind.num_experts_per_tok, self.kind.norm_topk_prob)
        if not self.stacked:
            return mix_experts(x_TD, router_logits_TE, router, self._run_expert, residual_TD)
        weights = ExpertWeights(self._group(0).w13.stack(), self._group(0).w2.stack())
        return self.ops.moe(x_TD, router_logits_TE, router, weights, Activation(), residual_TD)

    def _group(self, i: int) -> ExpertGroup:
        return cast(ExpertGroup, self.groups[i])

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        group = self._group(expert)
        return group.w2.format.matmul(group.w13.format.gated(x, None, "silu", None), None)


class MoE(nn.Module):
    """A softmax router picks the best experts of each token; their outputs are summed by its weights."""

    def __init__(self, config: ModelConfig, kind: ExpertsKind, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        assert config.residual_multiplier == 1.0, "the experts' kernel adds to the residual as it is"
        self.tp = tp
        self.gate = Linear(config.hidden_size, {"gate": kind.num_experts}, tp, ops, split=None)
        self.experts = Experts(config.hidden_size, kind, tp, ops)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, alone = norm.add(x_TD, residual_TD), self.tp.size == 1
        out_TD = self.experts.mix(normed_TD, self.gate(normed_TD), residual_TD if alone else None)
        return None if alone else out_TD, residual_TD
