"""fp8 weights on a GPU: what fp8_linear.py multiplies, made of a checkpoint's tensors, and the matmuls that
a layer asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.errors import CheckpointError
from shoal.kernels.matmul.fp8_linear import fp8_group, fp8_linear, fp8_linear_gated
from shoal.kernels.matmul.launch import matmul_of_norm
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.norm import add_rms_norm, rms_norm
from shoal.kernels.quant.fp8_quantize import rms_norm_fp8
from shoal.kernels.quant.fp8_tensor import SMALLEST_CUT, Fp8Rows, Fp8Tensor


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix of weights, [O, I]."""

    matrix: Fp8Matrix
    dtype: torch.dtype  # the activations' dtype

    def fp8_group(self, num_rows: int) -> int | None:
        return fp8_group(self.matrix, num_rows)

    def linear(self, x_TI: torch.Tensor | Fp8Rows, bias_O: torch.Tensor | None) -> torch.Tensor:
        return fp8_linear(x_TI, self.matrix, bias_O)

    def add(
        self, x_TI: torch.Tensor | Fp8Rows, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> None:
        """residual += the matmul, in place."""
        fp8_linear(x_TI, self.matrix, bias_O, residual_TO)

    def gated(
        self,
        x_TI: torch.Tensor | Fp8Rows,
        bias_2F: torch.Tensor | None,
        group: int | None = None,
        activation: str = "silu",
    ) -> torch.Tensor | Fp8Rows:
        return fp8_linear_gated(x_TI, self.matrix, bias_2F, group, activation)

    def normed(
        self, x_TI: torch.Tensor | None, residual_TI: torch.Tensor, norm_weight_I: torch.Tensor, eps: float
    ) -> torch.Tensor | Fp8Rows:
        """The norm of residual + x as the matmul wants it. The residual becomes that sum."""
        group = self.fp8_group(len(residual_TI))
        if group is not None:
            return rms_norm_fp8(x_TI, residual_TI, norm_weight_I, eps, group)
        if x_TI is None:
            return rms_norm(residual_TI, norm_weight_I, eps)
        return add_rms_norm(x_TI, residual_TI, norm_weight_I, eps)

    def of_norm(
        self,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor | None:
        """The matmul of the residual's norm, gated or not, where one kernel makes both."""
        return matmul_of_norm(residual_TI, norm_weight_I, eps, self.matrix, bias_O, activation)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, dequantized, [T, I]."""
        inputs, ids = self.matrix.data.shape[1], ids_T.long()
        data = self.matrix.data.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
        rows = Fp8Tensor((len(ids), inputs), data, self.matrix.scales.T[ids], self.matrix.group or inputs)
        return rows.dequantize(self.dtype, data.device)

    def write(self, row: int, tensor: Fp8Tensor) -> None:
        """Replaces the rows from `row` on."""
        rows = slice(row, row + tensor.shape[0])
        self.matrix.data.view(torch.uint8)[rows].copy_(tensor.data.view(torch.uint8))
        self.matrix.scales[:, rows].copy_(tensor.scales.T)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"packed": self.matrix.data.view(torch.uint8), "scales": self.matrix.scales}


def pack(
    tensors: Sequence[Fp8Tensor],
    replaced: Fp8Weight | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Fp8Weight:
    """Makes one weight of all the tensors' rows, in order. The memory of the weight `replaced` is used again.
    Raises CheckpointError for groups that no matmul has."""
    outs, inputs = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    size, groups = tensors[0].size, tensors[0].scales.shape[1]
    group = 0 if groups == 1 else size
    if group and (group < SMALLEST_CUT or group & (group - 1)):
        raise CheckpointError(
            f"blocks of {group} inputs share a scale, but matmuls in fp8 on a GPU want a power of two from "
            f"{SMALLEST_CUT} on; name a dtype ('bfloat16'), to which the weights are unpacked"
        )
    weight = replaced
    if weight is None or weight.matrix.data.shape != (outs, inputs) or weight.matrix.group != group:
        data = torch.empty(outs, inputs, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(groups, outs, dtype=torch.float32, device=device)
        weight = Fp8Weight(Fp8Matrix(data, scales, group), dtype)
    row = 0
    for tensor in tensors:
        assert tensor.shape[1] == inputs and tensor.size == size
        weight.write(row, tensor)
        row += tensor.shape[0]
    return weight
