"""Fp8Tensor: a matrix of weights in fp8 (e4m3), with scales for rows or for blocks of rows and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor

NAN = 0x7F  # The only bits, except for the sign, that are not a number in e4m3.
LARGEST = 448.0  # the largest number of e4m3
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
