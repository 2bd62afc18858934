"""GGUFTensor: a GGUF matrix as its file holds it, in rows of packed groups; and what those groups mean.

The formulas are ggml's, as tensor code that runs on any device. The order of operations follows the `gguf`
package, so that results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.ggml_types import GROUPS
from shoal.kernels.quant.quantized_tensor import RowwiseTensor

# Weights unpacked at a time: on the CPU few enough to stay in its caches, which is 4 times as fast as whole
# tensors; elsewhere enough to fill the device.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24
MOVED = 32  # columns that move together; each has scales of its own in all kinds


@dataclass(frozen=True)
class GGUFTensor(RowwiseTensor):
    """[out, in] weights; `data` is uint8 [out, bytes a row], usually a view of the memory-mapped file. Where
    columns were moved, `order` says which run of MOVED columns of the data stands at each place."""

    kind: str
    shape: tuple[int, int]
    data: np.ndarray
    order: np.ndarray | None = None  # None: the data's columns, all of them

    @property
    def group_size(self) -> int:
        """Returns the number of weights of a row that share a scale. Columns are cut at multiples of it."""
        return GROUPS[self.kind][0] if self.order is None else MOVED

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """[out, in] on `device`, to which the rows travel packed."""
        group_bytes = GROUPS[self.kind][1]
        out = torch.empty(self.shape, dtype=dtype, device=device)
        packed = torch.from_numpy(self.data)
        rows, columns = self.shape
        step = max(1, (CPU_CHUNK if out.device.type == "cpu" else DEVICE_CHUNK) // columns)
        for start in range(0, rows, step):
            part = packed[start : start + step].to(device)
            weights = UNPACK[self.kind](part.reshape(-1, group_bytes)).weights()
            out[start : start + step] = self._ordered(weights.view(len(part), -1))
        return out

    def numbers(self, device: torch.device | str) -> Numbers:
        """Quants [out, in], and scales and minima [out, scales], on `device`."""
        rows = self.shape[0]
        groups = torch.from_numpy(self.data).to(device).reshape(-1, GROUPS[self.kind][1])
        found = (
            None if part is None else self._ordered(part.reshape(rows, -1))
            for part in UNPACK[self.kind](groups)
        )
        return Numbers(*found)  # type: ignore[arg-type]

    def _ordered(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns numbers of the data's columns, [out, as many for each group], in the order of columns."""
        if self.order is None:
            return numbers
        num_moved = self.data.shape[1] // GROUPS[self.kind][1] * GROUPS[self.kind][0] // MOVED
        order = torch.from_numpy(self.order).to(numbers.device)
        return numbers.unflatten(1, (num_moved, -1))[:, order].flatten(1)

    def rows(self, start: int, stop: int) -> GGUFTensor:
        return replace(self, shape=(stop - start, self.shape[1]), data=self.data[start:stop])

    def columns(self, start: int, stop: int) -> GGUFTensor:
        """Raises CheckpointError if the cut goes through a group."""
        group_size, group_bytes = self.group_size, GROUPS[self.kind][1]
        if start % group_size or stop % group_size:
            raise CheckpointError(
                f"columns {start} to {stop} of a {self.kind} tensor of shape {list(self.shape)} cut through "
                f"its groups of {group_size}; choose a smaller tensor_parallel_size"
            )
        if self.order is not None:
            order = self.order[start // MOVED : stop // MOVED]
            return replace(self, shape=(self.shape[0], stop - start), order=order)
        data = self.data[:, start // group_size * group_bytes : stop // group_size * group_bytes]
        return replace(self, shape=(self.shape[0], stop - start), data=data)

    def take_rows(self, index: torch.Tensor) -> GGUFTensor:
        return replace(self, shape=(len(index), self.shape[1]), data=self.data[index.numpy()])

    def take_columns(self, order: np.ndarray) -> GGUFTensor:
        """The same rows with these runs of MOVED columns, in this order. They move when they are unpacked, as
        a group of the data may hold several runs."""
        own = order if self.order is None else self.order[order]
        return replace(self, shape=(self.shape[0], len(order) * MOVED), order=own)


def _signed(values: torch.Tensor, zero: int = 0) -> torch.Tensor:
    """uint8 to int8, less the value that stands for zero."""
    return values.to(torch.int8) - zero


def _half(groups: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each group, as float32 [n, 1]."""
    return groups[:, start : start + 2].contiguous().view(torch.float16).float()


def _bits(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """[n, k] bytes to [n, k * 8 / width] fields of `width` bits. Each `run` bytes give first the lowest
    fields of all of them, then the next higher ones."""
    runs = packed.reshape(len(packed), -1, run)
    mask = (1 << width) - 1
    fields = [(runs >> shift) & mask for shift in range(0, 8, width)]
    return torch.stack(fields, dim=2).flatten(1)


class Numbers(NamedTuple):
    """Content of n groups: a weight is quant * scale + minimum. A group has one scale or several, each for as
    many weights."""

    quants: torch.Tensor  # int8 [n, weights]
    scales: torch.Tensor  # float32 [n, scales]
    minima: torch.Tensor | None = None  # float32 [n, scales]

    def weights(self) -> torch.Tensor:
        """float32 [n, weights]"""
        n, count = self.scales.shape
        products = self.scales.unsqueeze(2) * self.quants.view(n, count, -1).float()
        return (products if self.minima is None else products + self.minima.unsqueeze(2)).flatten(1)


def _q4_0(groups: torch.Tensor) -> Numbers:
    return Numbers(_signed(_bits(groups[:, 2:], 4, 16), 8), _half(groups, 0))


def _q4_1(groups: torch.Tensor) -> Numbers:
    return Numbers(_signed(_bits(groups[:, 4:], 4, 16)), _half(groups, 0), _half(groups, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """The upper bits of Q5_0 and Q5_1, [n, 32], in their place. 4 bytes hold one bit a weight, in order."""
    return _bits(packed, 1, 1) << 4


def _q5_0(groups: torch.Tensor) -> Numbers:
    values = _bits(groups[:, 6:], 4, 16) | _fifth_bits(groups[:, 2:6])
    return Numbers(_signed(values, 16), _half(groups, 0))


def _q5_1(groups: torch.Tensor) -> Numbers:
    values = _bits(groups[:, 8:], 4, 16) | _fifth_bits(groups[:, 4:8])
    return Numbers(_signed(values), _half(groups, 0), _half(groups, 2))


def _q8_0(groups: torch.Tensor) -> Numbers:
    return Numbers(groups[:, 2:].contiguous().view(torch.int8), _half(groups, 0))


def _k_scales(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima [n, 8] of Q4_K and Q5_K. They have 6 bits each, in 12 bytes; the last four have their
    upper 2 bits in the first eight bytes. What is subtracted in the file is a negative minimum here."""
    low, middle, high = groups[:, 4:8], groups[:, 8:12], groups[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=1)
    return _half(groups, 0) * scales.float(), -(_half(groups, 2) * minima.float())


def _q4_k(groups: torch.Tensor) -> Numbers:
    return Numbers(_signed(_bits(groups[:, 16:], 4, 32)), *_k_scales(groups))


def _q5_k(groups: torch.Tensor) -> Numbers:
    values = _bits(groups[:, 48:], 4, 32) | (_bits(groups[:, 16:48], 1, 32) << 4)
    return Numbers(_signed(values), *_k_scales(groups))


def _q6_k(groups: torch.Tensor) -> Numbers:
    values = _bits(groups[:, :128], 4, 64) | (_bits(groups[:, 128:192], 2, 32) << 4)
    scales = _half(groups, 208) * groups[:, 192:208].contiguous().view(torch.int8).float()
    return Numbers(_signed(values, 32), scales)


# From groups, uint8 [n, bytes of a group], to what they hold.
UNPACK: dict[str, Callable[[torch.Tensor], Numbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
