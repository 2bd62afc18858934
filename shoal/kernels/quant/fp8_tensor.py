"""Fp8Tensor: a matrix of weights in fp8 (e4m3), with scales for rows or for blocks of rows and columns.
Fp8Rows: activations in fp8, which matmuls of fp8 with fp8 take. `quantize_rows` is the oracle of
fp8_quantize.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor

NAN = 0x7F  # The only bits, except for the sign, that are not a number in e4m3.
LARGEST = 448.0  # the largest number of e4m3
SMALLEST = 1e-12  # A group of zeros has the scale that a largest number of this size has.
SMALLEST_CUT = 32  # A cut of columns leaves groups of at least as many, as GPUs multiply no fewer.


@dataclass(frozen=True)
class Fp8Tensor(QuantizedTensor):
    """A weight is its fp8 number times its scale.

    data: float8_e4m3fn [O, I]. scales: float32 [O, ceil(I / group_size)], a row's own, so that rows can be
    cut and merged anywhere."""

    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor
    size: int  # columns of a group

    @classmethod
    def of(cls, data: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
        """`block`: rows and columns that share a scale; 0: all of them. Raises CheckpointError for what is no
        number."""
        outs, inputs = data.shape
        tall, wide = block[0] or outs, block[1] or inputs
        scales = scales.float().view(-(-outs // tall), -(-inputs // wide))
        if not scales.isfinite().all() or bool(((data.view(torch.uint8) & NAN) == NAN).any()):
            raise CheckpointError("weights or scales are NaN or infinite; the file is damaged")
        scales = scales.repeat_interleave(tall, dim=0)[:outs].contiguous()
        return cls((outs, inputs), data, scales, min(wide, inputs))

    @classmethod
    def zeros(cls, outs: int, inputs: int, block: tuple[int, int], device: torch.device) -> Fp8Tensor:
        """`block`: as for `of`."""
        size = min(block[1] or inputs, inputs)
        data = torch.zeros(outs, inputs, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(outs, -(-inputs // size), device=device, dtype=torch.float32)
        return cls((outs, inputs), data, scales, size)

    @classmethod
    def rounded(cls, weight_OI: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> Fp8Tensor:
        """A matrix of plain numbers, with a scale for each output that `scale_dtype` can hold."""
        weight = weight_OI.float()
        most = weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
        scales = (most / LARGEST).to(scale_dtype).float()
        data = (weight / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return cls((weight.shape[0], weight.shape[1]), data, scales, weight.shape[1])

    @property
    def group_size(self) -> int:
        # A row with one scale is cut anywhere. Where a cut goes through a group, groups become smaller.
        return 1 if self.size == self.shape[1] else math.gcd(self.size, SMALLEST_CUT)

    def fits(self, other: QuantizedTensor) -> bool:
        return isinstance(other, Fp8Tensor) and self.size == other.size

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        out = self.data.to(device).float()
        for group, scale_O in enumerate(self.scales.to(device).unbind(1)):
            out[:, group * self.size : (group + 1) * self.size] *= scale_O.unsqueeze(1)
        return out.to(dtype)

    def rows(self, start: int, stop: int) -> Fp8Tensor:
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            data=self.data[start:stop],
            scales=self.scales[start:stop],
        )

    def columns(self, start: int, stop: int) -> Fp8Tensor:
        if start == 0 and stop == self.shape[1]:
            return self
        size = stop - start
        if self.size < self.shape[1]:
            end = self.size if stop == self.shape[1] else stop  # The last group may be a part of one.
            size = math.gcd(self.size, start, end)
            if size < self.group_size:
                raise CheckpointError(
                    f"columns {start} to {stop} of an fp8 matrix of shape {list(self.shape)} are not "
                    f"multiples of {self.group_size}; choose a smaller tensor_parallel_size"
                )
        taken = torch.arange(start, stop, size, device=self.scales.device) // self.size
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            data=self.data[:, start:stop],
            scales=self.scales[:, taken],
            size=min(size, stop - start),
        )


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A number is its fp8 number times the scale of its row, or of its row and group of columns.

    data: float8_e4m3fn [T, I]. scales: float32 [groups, T], so that rows which are multiplied together have
    their scales side by side. dtype: what the numbers were, and what a matmul of them is."""

    data: torch.Tensor
    scales: torch.Tensor
    group: int  # columns that share a scale; 0: all of a row
    dtype: torch.dtype

    def __len__(self) -> int:  # rows, as a tensor's len is
        return self.data.shape[0]

    def dequantize(self) -> torch.Tensor:
        """float32 [T, I]."""
        size = self.group or self.data.shape[1]
        of_each = self.scales.T.repeat_interleave(size, dim=1)[:, : self.data.shape[1]]
        return self.data.float() * of_each


def quantize_rows(x_TI: torch.Tensor, group: int) -> Fp8Rows:
    """Rounds rows to fp8, so that the largest number of each group is the largest one that there is."""
    inputs = x_TI.shape[1]
    size = group or inputs
    padded = torch.nn.functional.pad(x_TI.float(), (0, -inputs % size))
    groups = padded.unflatten(1, (-1, size))
    scales = groups.abs().amax(2, keepdim=True).clamp(min=SMALLEST) / LARGEST
    data = (groups * (1.0 / scales)).to(torch.float8_e4m3fn).flatten(1)[:, :inputs]
    return Fp8Rows(data.contiguous(), scales.squeeze(2).T.contiguous(), group, x_TI.dtype)
