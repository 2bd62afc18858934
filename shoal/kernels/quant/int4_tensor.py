"""Int4Tensor: a matrix of 4-bit weights with a scale and a zero point for each group of inputs, whatever
layout a checkpoint had them in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class Int4Tensor(QuantizedTensor):
    """A weight is (quant - zero) * scale.

    quants: uint8 [O, I / 2], the input of even number in the low bits. scales: float32 [O, G]. zeros: uint8
    [O, G], 0 to 15. groups: int64 [I], each input's group; None: they lie in order, all of one size."""

    shape: tuple[int, int]
    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        quants_OI: torch.Tensor,
        scales_OG: torch.Tensor,
        zeros_OG: torch.Tensor | None,
        groups_I: torch.Tensor | None = None,
    ) -> Int4Tensor:
        """From a byte for each weight. Without zero points they are 8. Raises CheckpointError for scales that
        are NaN or infinite, and for groups that do not exist."""
        scales = scales_OG.float().contiguous()
        if not scales.isfinite().all():
            raise CheckpointError("scales are NaN or infinite; the file is damaged")
        zeros = torch.full_like(scales, 8, dtype=torch.uint8) if zeros_OG is None else zeros_OG.contiguous()
        size = quants_OI.shape[1] // scales.shape[1]
        if groups_I is not None:
            if not 0 <= int(groups_I.min()) <= int(groups_I.max()) < scales.shape[1]:
                raise CheckpointError(
                    f"g_idx names groups from {int(groups_I.min())} to {int(groups_I.max())}, of "
                    f"{scales.shape[1]}"
                )
            groups_I = groups_I.long()
            if torch.equal(groups_I, torch.arange(len(groups_I)) // size):
                groups_I = None
        pairs = quants_OI[:, 0::2] | (quants_OI[:, 1::2] << 4)
        return cls((quants_OI.shape[0], quants_OI.shape[1]), pairs.contiguous(), scales, zeros, groups_I)

    @property
    def group_size(self) -> int:
        return 2 if self.groups is not None else self.shape[1] // self.scales.shape[1]

    def unpacked(self) -> torch.Tensor:
        """The quants, uint8 [O, I]."""
        return torch.stack((self.quants & 15, self.quants >> 4), dim=2).flatten(1)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        here = replace(
            self, quants=self.quants.to(device), scales=self.scales.to(device), zeros=self.zeros.to(device)
        )
        groups = self.groups
        if groups is None:
            groups = torch.arange(self.shape[1]) // self.group_size
        groups = groups.to(device)
        return ((here.unpacked().float() - here.zeros[:, groups].float()) * here.scales[:, groups]).to(dtype)

    def rows(self, start: int, stop: int) -> Int4Tensor:
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            quants=self.quants[start:stop],
            scales=self.scales[start:stop],
            zeros=self.zeros[start:stop],
        )

    def columns(self, start: int, stop: int) -> Int4Tensor:
        size = self.group_size
        if start % size or stop % size or start % 2 or stop % 2:
            raise CheckpointError(
                f"columns {start} to {stop} of a matrix of shape {list(self.shape)} in 4 bits cut through "
                f"its groups of {size}; choose a smaller tensor_parallel_size"
            )
        cut = replace(
            self, shape=(self.shape[0], stop - start), quants=self.quants[:, start // 2 : stop // 2]
        )
        if self.groups is not None:
            return replace(cut, groups=self.groups[start:stop])
        taken = slice(start // size, stop // size)
        return replace(cut, scales=self.scales[:, taken], zeros=self.zeros[:, taken])
