"""Matmuls with fp8 weights on the CPU. The weights stay the checkpoint's own bytes; the C kernel multiplies
them with float32 activations, as exactly as float32 does. Without the library, PyTorch unpacks some rows at a
time for each matmul, which is far slower."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.quant.fp8_tensor import Fp8Tensor

CHUNK = 1 << 20  # As many weights are unpacked at a time without the library.
LIBRARY = cpu_build.load()


@dataclass(frozen=True, slots=True)
class CpuFp8Weight:
    """A matrix of weights, [O, I]."""

    tensor: Fp8Tensor
    library: ctypes.CDLL | None

    def linear(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, O], in x's dtype, computed in float32."""
        x = x_TI.float().contiguous()
        (outs, inputs), tokens = self.tensor.shape, len(x)
        assert x.shape[1] == inputs
        if self.library is None:
            step = max(1, CHUNK // inputs)
            y = torch.cat(
                [
                    F.linear(x, self.tensor.rows(start, min(outs, start + step)).dequantize())
                    for start in range(0, outs, step)
                ],
                dim=1,
            )
        else:
            y = torch.empty(tokens, outs, dtype=torch.float32)
            self.library.shoal_fp8_linear(
                self.tensor.data.data_ptr(),
                self.tensor.scales.data_ptr(),
                outs,
                inputs,
                self.tensor.size,
                x.data_ptr(),
                tokens,
                y.data_ptr(),
            )
        return (y if bias_O is None else y + bias_O.float()).to(x_TI.dtype)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, dequantized: float32 [T, I]."""
        data, scales = self.tensor.data.view(torch.uint8)[ids_T.long()], self.tensor.scales[ids_T.long()]
        rows = Fp8Tensor(
            (len(ids_T), self.tensor.shape[1]), data.view(torch.float8_e4m3fn), scales, self.tensor.size
        )
        return rows.dequantize()

    def write(self, row: int, tensor: Fp8Tensor) -> None:
        """Replaces the rows from `row` on."""
        rows = slice(row, row + tensor.shape[0])
        self.tensor.data.view(torch.uint8)[rows] = tensor.data.view(torch.uint8)
        self.tensor.scales[rows] = tensor.scales

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"packed": self.tensor.data.view(torch.uint8), "scales": self.tensor.scales}


def pack(tensors: Sequence[Fp8Tensor], replaced: CpuFp8Weight | None = None) -> CpuFp8Weight:
    """Makes one weight of all the tensors' rows, in order. The memory of the weight `replaced` is used
    again."""
    outs, inputs = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    groups = tensors[0].scales.shape[1]
    if replaced is not None and replaced.tensor.scales.shape == (outs, groups):
        whole = replaced.tensor
    else:
        data = torch.empty(outs, inputs, dtype=torch.float8_e4m3fn)
        scales = torch.empty(outs, groups, dtype=torch.float32)
        whole = Fp8Tensor((outs, inputs), data, scales, tensors[0].size)
    weight, row = CpuFp8Weight(whole, LIBRARY), 0
    for tensor in tensors:
        assert tensor.shape[1] == inputs and tensor.size == whole.size
        weight.write(row, tensor)
        row += tensor.shape[0]
    return weight
