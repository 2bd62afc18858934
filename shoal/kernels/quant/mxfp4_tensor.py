"""Mxfp4Tensor: a matrix of 4-bit floating-point weights (e2m1); each 32 share a power of two (OCP's
Microscaling Formats, MXFP4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import RowwiseTensor

SCALE_GROUP = 32
BIAS = 127  # e8m0: a scale's exponent is its byte less this.
NAN = 255  # the one byte that is not a scale
# The numbers by their bits: sign, two of exponent, one of mantissa
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Mxfp4Tensor(RowwiseTensor):
    """quants: uint8 [O, I / 2], the input of even number in the low bits. scales: uint8 [O, I / 32], e8m0."""

    shape: tuple[int, int]
    quants: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, quants: torch.Tensor, scales: torch.Tensor) -> Mxfp4Tensor:
        """Raises CheckpointError for scales that are NaN."""
        if bool((scales == NAN).any()):
            raise CheckpointError("scales are NaN; the file is damaged")
        return cls((quants.shape[0], 2 * quants.shape[1]), quants.contiguous(), scales.contiguous())

    @classmethod
    def of_ggml(cls, data: torch.Tensor) -> Mxfp4Tensor:
        """From rows of a GGUF file, uint8 [O, bytes]: of 32 inputs first the scale, then 16 bytes, of which
        byte j holds inputs j, in its low bits, and j + 16."""
        groups = data.unflatten(1, (-1, 1 + SCALE_GROUP // 2))
        halves = groups[..., 1:]
        bits = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
        return cls.of(bits[:, 0::2] | (bits[:, 1::2] << 4), groups[..., 0])

    @property
    def group_size(self) -> int:
        return SCALE_GROUP

    def unpacked(self) -> torch.Tensor:
        """The quants, uint8 [O, I]."""
        return torch.stack((self.quants & 15, self.quants >> 4), dim=2).flatten(1)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        quants = replace(self, quants=self.quants.to(device)).unpacked()
        values = torch.tensor(VALUES, dtype=torch.float32, device=device)[quants.int()]
        exponents = self.scales.to(device).int().unsqueeze(2) - BIAS
        return torch.ldexp(values.unflatten(1, (-1, SCALE_GROUP)), exponents).flatten(1).to(dtype)

    def take_rows(self, index: torch.Tensor) -> Mxfp4Tensor:
        return replace(
            self, shape=(len(index), self.shape[1]), quants=self.quants[index], scales=self.scales[index]
        )

    def rows(self, start: int, stop: int) -> Mxfp4Tensor:
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            quants=self.quants[start:stop],
            scales=self.scales[start:stop],
        )

    def columns(self, start: int, stop: int) -> Mxfp4Tensor:
        if start % SCALE_GROUP or stop % SCALE_GROUP:
            raise CheckpointError(
                f"columns {start} to {stop} of a matrix of shape {list(self.shape)} in mxfp4 cut through its "
                f"groups of {SCALE_GROUP}; choose a smaller tensor_parallel_size"
            )
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            quants=self.quants[:, start // 2 : stop // 2],
            scales=self.scales[:, start // SCALE_GROUP : stop // SCALE_GROUP],
        )
