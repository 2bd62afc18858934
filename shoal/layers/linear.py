"""Linear layers, whole or sharded over tensor-parallel ranks (Megatron-LM's column and row split). A layer
cuts its own shard out of what it loads; how the shard is stored and is multiplied is its format's
(weight_format.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from shoal.kernels.ops import Ops
from shoal.layers.loading import CheckpointTensor, Loaded, check_shape, copy_into, narrow
from shoal.layers.matrix import MatrixLayer
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig


class Linear(MatrixLayer):
    """y = x W^T + b.

    `parts` are the tensors of the checkpoint that are merged into this one matmul (q, k and v, or gate and
    up): the name of each, and its number of outputs.

    split "columns": the outputs of each part are divided over the ranks. A part with fewer units (kv heads)
    than ranks is replicated: `replicas[i]` ranks share one shard of part i.
    split "rows": the inputs are divided, and the partial sums are all-reduced.

    `multiplier`: what `add_to` multiplies y by before it is added to the residual.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        tp: TensorParallel,
        ops: Ops,
        *,
        split: str | None,
        bias: bool = False,
        replicas: tuple[int, ...] | None = None,
        multiplier: float = 1.0,
    ) -> None:
        replicas = replicas or (1,) * len(parts)
        columns = tp.size if split == "columns" else 1
        super().__init__(
            [size * same // columns for size, same in zip(parts.values(), replicas)],
            in_features // tp.size if split == "rows" else in_features,
            ops,
        )
        self.tp, self.split, self.multiplier, self.replicas = tp, split, multiplier, replicas
        self.full_in, self.full_parts = in_features, dict(parts)
        self.in_features = in_features // tp.size if split == "rows" else in_features
        self.bias = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if bias else None

    def checkpoint_tensors(self, path: str) -> Iterator[CheckpointTensor]:
        parent = path.rpartition(".")[0]
        for part, (name, size) in enumerate(self.full_parts.items()):
            own = f"{parent}.{name}"
            shape = (size, self.full_in)
            yield CheckpointTensor(f"{own}.weight", shape, partial(self._load_weight, part))
            if self.bias is not None:
                yield CheckpointTensor(f"{own}.bias", (size,), partial(self._load_bias, part))

    def _load_weight(self, part: int, tensor: Loaded, name: str) -> None:
        size = list(self.full_parts.values())[part]
        check_shape(name, tuple(tensor.shape), (size, self.full_in))
        tensor = self._rows_of_rank(part, tensor)
        if self.split == "rows":
            tensor = narrow(tensor, 1, self.tp.rank * self.in_features, self.in_features)
        self._load_part(part, tensor, name)

    def _load_bias(self, part: int, tensor: Loaded, name: str) -> None:
        check_shape(name, tuple(tensor.shape), (list(self.full_parts.values())[part],))
        copy_into(self._part_of(self.bias, part), self._rows_of_rank(part, tensor), name)

    def _rows_of_rank(self, part: int, tensor: Loaded) -> Loaded:
        if self.split != "columns":
            return tensor
        shard = self.tp.rank // self.replicas[part]
        return narrow(tensor, 0, shard * self.parts[part], self.parts[part])

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.split != "rows" else None
        y_TO = self.format.matmul(x_TI, bias)
        if self.split == "rows":
            y_TO = self.tp.all_reduce(y_TO)
            if self.bias is not None:
                y_TO = y_TO + self.bias
        return y_TO

    def add_to(self, x_TI: torch.Tensor, residual_TO: torch.Tensor) -> torch.Tensor | None:
        """Adds y to the residual in place, and returns None; or leaves the sum to the next norm, and returns
        this rank's part of y. For a layer that is split over its inputs.

        The sum is left to the norm on several ranks, because it sums over the ranks in one kernel with that;
        with a multiplier, which the kernel that adds a matmul does not know; and by formats without such a
        kernel.
        """
        bias = self.bias if self.tp.rank == 0 else None  # once in the sum
        if self.multiplier != 1.0:
            return self.format.matmul(x_TI, bias).mul_(self.multiplier)
        if self.tp.size > 1:
            return self.format.matmul(x_TI, bias)
        return self.format.add(x_TI, bias, residual_TO)

    def add_selected(
        self, x_TI: torch.Tensor, residual_TO: torch.Tensor, select_S: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `add_to`, of the rows `select_S`; None: of all. Returns its result and the residual of these."""
        if select_S is not None:
            residual_TO = residual_TO[select_S]
            if len(select_S) == 0:
                return None, residual_TO
            x_TI = x_TI[select_S]
        return self.add_to(x_TI, residual_TO), residual_TO

    def gated(self, x_TI: torch.Tensor, activation: str, reader: Linear | None = None) -> torch.Tensor:
        """activation(gate) * up, for a layer of the parts gate and up that is not split over its inputs. It
        comes as `reader` wants it, the layer that takes it next."""
        return self.format.gated(x_TI, self.bias, activation, None if reader is None else reader.format)


def output_linear(
    config: ModelConfig, name: str, in_features: int, tp: TensorParallel, ops: Ops, bias: bool = False
) -> Linear:
    """The matmul at the end of a mixer or an MLP, whose result is added to the residual."""
    parts, multiplier = {name: config.hidden_size}, config.residual_multiplier
    return Linear(in_features, parts, tp, ops, split="rows", bias=bias, multiplier=multiplier)
