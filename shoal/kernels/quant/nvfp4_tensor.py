"""Nvfp4Tensor: a matrix of 4-bit floating-point weights (e2m1), of which each 16 share a scale (NVFP4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.mxfp4_tensor import VALUES
from shoal.kernels.quant.quantized_tensor import QuantizedTensor

SCALE_GROUP = 16


@dataclass(frozen=True)
class Nvfp4Tensor(QuantizedTensor):
    """quants: uint8 [O, I / 2], the input of even number in the low bits. scales: float32 [O, I / 16], which
    contain the scale of the whole matrix."""

    shape: tuple[int, int]
    quants: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, quants: torch.Tensor, scales: torch.Tensor) -> Nvfp4Tensor:
        """Raises CheckpointError for scales that are NaN or infinite."""
        if not scales.isfinite().all():
            raise CheckpointError("scales are NaN or infinite; the file is damaged")
        return cls((quants.shape[0], 2 * quants.shape[1]), quants.contiguous(), scales.contiguous())

    @property
    def group_size(self) -> int:
        return SCALE_GROUP

    def unpacked(self) -> torch.Tensor:
        """The quants, uint8 [O, I]."""
        return torch.stack((self.quants & 15, self.quants >> 4), dim=2).flatten(1)

    def as_fp8(self) -> Fp8Tensor:
        """The same numbers, as fp8 has all of e2m1's."""
        values = torch.tensor(VALUES, dtype=torch.float32, device=self.quants.device)
        data = values.to(torch.float8_e4m3fn).view(torch.uint8)
        numbers = data[self.unpacked().int()].view(torch.float8_e4m3fn)
        return Fp8Tensor(self.shape, numbers, self.scales, SCALE_GROUP)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        here = replace(self, quants=self.quants.to(device), scales=self.scales.to(device))
        return here.as_fp8().dequantize(dtype, device)

    def rows(self, start: int, stop: int) -> Nvfp4Tensor:
        shape = stop - start, self.shape[1]
        return replace(self, shape=shape, quants=self.quants[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> Nvfp4Tensor:
        if start % SCALE_GROUP or stop % SCALE_GROUP:
            raise CheckpointError(
                f"columns {start} to {stop} of a matrix of shape {list(self.shape)} in nvfp4 cut through its "
                f"groups of {SCALE_GROUP}; choose a smaller tensor_parallel_size"
            )
        return replace(
            self,
            shape=(self.shape[0], stop - start),
            quants=self.quants[:, start // 2 : stop // 2],
            scales=self.scales[:, start // SCALE_GROUP : stop // SCALE_GROUP],
        )
