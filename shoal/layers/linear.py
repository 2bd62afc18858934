"""Linear layers, whole or sharded over tensor-parallel ranks (Megatron-LM's column and row split). A layer
shards what it loads.

A weight that comes quantized stays so on the CPU (`keep_quantized`), packed for our kernels; elsewhere it is
dequantized while loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.kernels.ops import Ops
from shoal.kernels.quantized_tensor import QuantizedTensor
from shoal.layers.parallel import TensorParallel

Loaded = torch.Tensor | QuantizedTensor


def narrow(tensor: Loaded, dim: int, start: int, length: int) -> Loaded:
    """The slice [start, start + length) along `dim`. A quantized tensor stays so unless the cut goes through
    a group of columns."""
    if isinstance(tensor, QuantizedTensor):
        if dim == 0:
            return tensor.rows(start, start + length)
        if start % tensor.group_size == 0 and length % tensor.group_size == 0:
            return tensor.columns(start, start + length)
        tensor = tensor.dequantize()
    return tensor.narrow(dim, start, length)


def copy_into(parameter: torch.Tensor, tensor: Loaded, name: str) -> None:
    """Copies (dequantizing) into a parameter of the same shape; raises CheckpointError that names both
    shapes."""
    check_shape(name, tuple(tensor.shape), tuple(parameter.shape))
    if isinstance(tensor, QuantizedTensor):
        tensor = tensor.dequantize(parameter.dtype, parameter.device)
    parameter.data.copy_(tensor)


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(
            f"{name} has shape {list(found)}, but the config asks for {list(expected)}; is it another "
            "model's file?"
        )


class Linear(nn.Module):
    """y = x W^T + b. `parts` are the output sizes of the checkpoint's tensors that are merged into one
    product (q, k, v or gate, up).

    split "columns": each part's outputs are divided over the ranks; a part with fewer units (kv heads) than
    ranks is replicated: `replicas[i]` ranks share one shard of part i. split "rows": the inputs are divided,
    partial sums are all-reduced.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        tp: TensorParallel,
        ops: Ops,
        *,
        split: str | None,
        bias: bool = False,
        replicas: tuple[int, ...] | None = None,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.ops, self.split, self.keep_quantized = tp, ops, split, keep_quantized
        self.full_in, self.full_parts = in_features, parts
        self.replicas = replicas or (1,) * len(parts)
        columns = tp.size if split == "columns" else 1
        self.parts = tuple(p * r // columns for p, r in zip(parts, self.replicas))
        self.in_features = in_features // tp.size if split == "rows" else in_features
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(sum(self.parts), self.in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if bias else None
        self.pieces: dict[int, QuantizedTensor] = {}
        self.packed: Any = None  # kernels/cpu_linear.py's packed weights

    def load(self, parameter: str, tensor: Loaded, part: int, name: str) -> None:
        """Takes this rank's shard of a whole checkpoint tensor ("weight" or "bias" of one part)."""
        full = (self.full_parts[part], self.full_in) if parameter == "weight" else (self.full_parts[part],)
        check_shape(name, tuple(tensor.shape), full)
        if self.split == "columns":
            shard = self.tp.rank // self.replicas[part]
            tensor = narrow(tensor, 0, shard * self.parts[part], self.parts[part])
        elif self.split == "rows" and parameter == "weight":
            tensor = narrow(tensor, 1, self.tp.rank * self.in_features, self.in_features)
        if self.keep_quantized and parameter == "weight" and isinstance(tensor, QuantizedTensor):
            self.pieces[part] = tensor
            return
        target = getattr(self, parameter)
        if target is None:
            raise CheckpointError(
                f"{name} is in the checkpoint, but the config says this layer has no {parameter}"
            )
        copy_into(target[sum(self.parts[:part]) :][: self.parts[part]], tensor, name)

    def finish(self) -> None:
        """Packs weights that stay quantized. A merge of quantized and plain parts becomes plain."""
        if len(self.pieces) == len(self.parts):
            from shoal.kernels import cpu_linear

            self.packed = cpu_linear.pack([self.pieces[i] for i in range(len(self.parts))], self.packed)
            self.weight = None
        else:
            for part, piece in self.pieces.items():
                copy_into(self.weight[sum(self.parts[:part]) :][: self.parts[part]], piece, "weight")  # type: ignore[index]
        self.pieces = {}

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.split != "rows" else None
        if self.packed is not None:
            from shoal.kernels import cpu_linear

            y_TO = cpu_linear.packed_linear(x_TI, self.packed, bias)
        else:
            y_TO = self.ops.linear(x_TI, self.weight, bias)  # type: ignore[arg-type]
        if self.split == "rows":
            y_TO = self.tp.all_reduce(y_TO)
            if self.bias is not None:
                y_TO = y_TO + self.bias
        return y_TO

    def add_to(self, x_TI: torch.Tensor, residual_TO: torch.Tensor) -> torch.Tensor | None:
        """Adds y to the residual in place, and returns None; or leaves it to the next norm, and returns y: of
        several ranks, whose sums would round once more before the all-reduce, and of packed weights, after
        which the norm's C kernel adds in passing."""
        if self.tp.size > 1 or self.packed is not None:
            return self(x_TI)
        return self.ops.linear_add(x_TI, self.weight, self.bias, residual_TO)  # type: ignore[arg-type]

    def silu_mul(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Of a layer with the parts (gate, up), not split over its inputs: silu(gate) * up."""
        if self.packed is not None:
            return self.ops.silu_mul(self(x_TI))
        return self.ops.linear_silu_mul(x_TI, self.weight, self.bias)  # type: ignore[arg-type]
