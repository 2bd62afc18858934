"""The feed-forward half of a layer: the norm of the residual, then SwiGLU (Shazeer 2020), dense or as a
mixture of experts.

Both kinds take what is to be added to the residual (None: nothing). They return what the next layer has to
add, and the new residual. On several ranks what is to be added is each rank's part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.kernels.quantized_tensor import QuantizedTensor
from shoal.kernels.reference import mix_experts
from shoal.layers.linear import Linear
from shoal.layers.loading import CheckpointTensor, Loaded, LoadingLayer, check_shape, copy_into, narrow
from shoal.layers.norm import RMSNorm
from shoal.layers.parallel import TensorParallel
from shoal.layers.weight_format import PlainWeight, WeightFormat, pack
from shoal.model_config import ModelConfig


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            tp,
            ops,
            split="columns",
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(
            size,
            {"down_proj": config.hidden_size},
            tp,
            ops,
            split="rows",
            bias=config.mlp_bias,
            multiplier=config.residual_multiplier,
        )

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden_TF, residual_TD = norm.add_linear(
            x_TD, residual_TD, self.gate_up_proj, silu_mul=True, reader=self.down_proj
        )
        return self.down_proj.add_to(hidden_TF, residual_TD), residual_TD


class Experts(LoadingLayer):
    """The weights of all experts in two tensors: w13 [E, 2F, D] (gate, then up) and w2 [E, D, F]. F is
    divided over the ranks.

    An expert's matrices that come quantized stay so where the layer is told to keep them (`keep_quantized`),
    but on a CPU alone, where experts are run one after the other. Where all are, the tensor is gone."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.tp, self.ops, self.num_experts, self.keep_quantized = tp, ops, config.num_experts, False
        self.hidden, self.full = config.hidden_size, config.moe_intermediate_size
        self.shard = self.full // tp.size
        wide, tall = (2 * self.shard, self.hidden), (self.hidden, self.shard)
        self.w13: nn.Parameter | None = nn.Parameter(
            torch.empty(self.num_experts, *wide), requires_grad=False
        )
        self.w2: nn.Parameter | None = nn.Parameter(torch.empty(self.num_experts, *tall), requires_grad=False)
        # By expert and the tensor's name: its matrix, and by part what has come for it.
        self._packed: dict[tuple[int, str], WeightFormat] = {}
        self._pieces: dict[tuple[int, str], dict[int, QuantizedTensor]] = {}

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        wide, tall = (self.full, self.hidden), (self.hidden, self.full)
        for e in range(self.num_experts):
            own = f"{path}.{e}"
            yield CheckpointTensor(f"{own}.gate_proj.weight", wide, partial(self._load_half, e, 0))
            yield CheckpointTensor(f"{own}.up_proj.weight", wide, partial(self._load_half, e, 1))
            yield CheckpointTensor(f"{own}.down_proj.weight", tall, partial(self._load_down, e))

    def _load_half(self, expert: int, half: int, tensor: Loaded, name: str) -> None:
        """Loads this rank's part of an expert's gate (`half` 0) or up (`half` 1) into w13."""
        check_shape(name, tuple(tensor.shape), (self.full, self.hidden))
        shard = narrow(tensor, 0, self.tp.rank * self.shard, self.shard)
        self._load_part((expert, "w13"), half, 2, shard, name)

    def _load_down(self, expert: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (self.hidden, self.full))
        shard = narrow(tensor, 1, self.tp.rank * self.shard, self.shard)
        self._load_part((expert, "w2"), 0, 1, shard, name)

    def _load_part(self, which: tuple[int, str], part: int, parts: int, shard: Loaded, name: str) -> None:
        plain = getattr(self, which[1])
        on_cpu = plain is None or plain.device.type == "cpu"
        if not (self.keep_quantized and on_cpu and isinstance(shard, QuantizedTensor)):
            self._copy_part(which, part, shard, name)
            return
        pieces = self._pieces.setdefault(which, {})
        pieces[part] = shard
        if len(pieces) == parts:
            old = self._packed.get(which, WeightFormat(self.ops))
            matrices, cpu = [pieces[i] for i in range(parts)], torch.device("cpu")
            self._packed[which] = pack(matrices, self.ops, old, cpu, torch.float32)
            del self._pieces[which]

    def _copy_part(self, which: tuple[int, str], part: int, shard: Loaded, name: str) -> None:
        expert, tensor = which
        rows = shard.shape[0]
        copy_into(getattr(self, tensor)[expert].narrow(0, part * rows, rows), shard, name)

    def finish(self) -> None:
        for which, pieces in self._pieces.items():  # Their other part is plain.
            for part, piece in pieces.items():
                self._copy_part(which, part, piece, "weight")
        self._pieces = {}
        for tensor in ("w13", "w2"):
            if all((expert, tensor) in self._packed for expert in range(self.num_experts)):
                setattr(self, tensor, None)

    def packed_tensors(self) -> Mapping[str, torch.Tensor]:
        """The memory of the matrices that stay quantized, by name."""
        return {
            f"{expert}.{which}.{name}": tensor
            for (expert, which), packed in self._packed.items()
            for name, tensor in packed.tensors().items()
        }

    def mix(
        self,
        x_TD: torch.Tensor,
        router_logits_TE: torch.Tensor,
        top_k: int,
        norm_topk_prob: bool,
        residual_TD: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum of each token's `top_k` best experts, by router weight. It is added to the residual in
        place, if there is one."""
        if not self._packed:
            assert self.w13 is not None and self.w2 is not None
            return self.ops.moe(x_TD, router_logits_TE, self.w13, self.w2, top_k, norm_topk_prob, residual_TD)
        return mix_experts(x_TD, router_logits_TE, self._run_expert, top_k, norm_topk_prob, residual_TD)

    def _run_expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(expert, "w2").multiply(self._matrix(expert, "w13").gated(x, None), None)

    def _matrix(self, expert: int, tensor: str) -> WeightFormat:
        if (expert, tensor) in self._packed:
            return self._packed[expert, tensor]
        return PlainWeight(self.ops, getattr(self, tensor)[expert])


class MoE(nn.Module):
    """A softmax router picks the best `top_k` experts of each token; their outputs are summed by its
    weights."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        assert config.residual_multiplier == 1.0, "the experts' kernel adds to the residual as it is"
        self.tp = tp
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, {"gate": config.num_experts}, tp, ops, split=None)
        self.experts = Experts(config, tp, ops)

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        normed_TD, alone = norm.add(x_TD, residual_TD), self.tp.size == 1
        out_TD = self.experts.mix(
            normed_TD, self.gate(normed_TD), self.top_k, self.norm_topk_prob, residual_TD if alone else None
        )
        return None if alone else out_TD, residual_TD
