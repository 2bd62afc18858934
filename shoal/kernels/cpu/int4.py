"""Matmuls with 4-bit weights of checkpoints (Int4Tensor) on the CPU, by the C kernel of linear.py.

The matrix is packed as Q4_1: each 32 inputs get their group's scale and minimum, -zero * scale, in float16.
Scales that are float16 lose nothing; a minimum is rounded to 11 bits, and is exact where zero points are 8.
With act-order, inputs are sorted by their groups, and so are the activations before each matmul.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kernels.cpu import linear as cpu_linear
from shoal.kernels.cpu.linear import SCALE_GROUP, CpuWeight, TorchWeight
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.int4_tensor import Int4Tensor


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """Matrices side by side, each with an order of inputs of its own."""

    orders: tuple[torch.Tensor, ...]
    parts: tuple[CpuWeight | TorchWeight, ...]

    def linear(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        y_TO = torch.cat(
            [part.linear(x_TI[:, order], None) for order, part in zip(self.orders, self.parts)], dim=1
        )
        return y_TO if bias_O is None else y_TO + bias_O

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        ((order,), (part,)) = self.orders, self.parts
        return part.embed(ids_T)[:, order.argsort()]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {
            f"{i}.{name}": tensor
            for i, part in enumerate(self.parts)
            for name, tensor in part.tensors().items()
        }


def pack(
    tensors: Sequence[Int4Tensor], replaced: CpuWeight | TorchWeight | ReorderedWeight | None = None
) -> CpuWeight | TorchWeight | ReorderedWeight:
    """Makes one weight of all the tensors' rows, in order. Raises CheckpointError for groups that are not
    multiples of 32 inputs."""
    orders = [None if t.groups is None else torch.argsort(t.groups, stable=True) for t in tensors]
    if all(order is None for order in orders):
        old = None if isinstance(replaced, ReorderedWeight) else replaced
        return cpu_linear.pack([_q4_1(tensor, None) for tensor in tensors], old)
    before: Sequence[CpuWeight | TorchWeight | None] = [None] * len(tensors)
    if isinstance(replaced, ReorderedWeight):
        before = replaced.parts
    return ReorderedWeight(
        tuple(torch.arange(t.shape[1]) if order is None else order for t, order in zip(tensors, orders)),
        tuple(
            cpu_linear.pack([_q4_1(tensor, order)], old)
            for tensor, order, old in zip(tensors, orders, before)
        ),
    )


def _q4_1(tensor: Int4Tensor, order: torch.Tensor | None) -> GGUFTensor:
    """The matrix, its inputs in that order, as rows of Q4_1: scale, minimum, then 16 bytes with the first
    half of the weights in the low bits."""
    outs, inputs = tensor.shape
    groups = torch.arange(inputs) // tensor.group_size if order is None else tensor.groups[order]  # type: ignore[index]
    of_32 = groups.view(-1, SCALE_GROUP) if inputs % SCALE_GROUP == 0 else None
    if of_32 is None or bool((of_32 != of_32[:, :1]).any()):
        raise CheckpointError(
            f"a matrix of shape {[outs, inputs]} in 4 bits has groups that are not multiples of "
            f"{SCALE_GROUP} inputs on this rank, for which there is no matmul on a CPU; name a dtype, to "
            "which its weights are unpacked, or lower tensor_parallel_size"
        )
    quants = tensor.unpacked() if order is None else tensor.unpacked()[:, order]
    quants = quants.view(outs, -1, SCALE_GROUP)
    scales, zeros = tensor.scales[:, of_32[:, 0]], tensor.zeros[:, of_32[:, 0]]
    heads = torch.stack((scales, -zeros.float() * scales), dim=2).half()
    if not heads.isfinite().all():
        raise CheckpointError(
            f"a matrix of shape {[outs, inputs]} in 4 bits has a scale of {scales.abs().max():g}, which "
            "float16, in which a CPU keeps scales and minima, has no room for; name a dtype, to which its "
            "weights are unpacked"
        )
    nibbles = quants[..., : SCALE_GROUP // 2] | (quants[..., SCALE_GROUP // 2 :] << 4)
    data: np.ndarray = torch.cat((heads.view(torch.uint8), nibbles), dim=2).flatten(1).numpy()
    return GGUFTensor("Q4_1", (outs, inputs), data)
