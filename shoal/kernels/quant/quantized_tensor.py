"""QuantizedTensor: a matrix of a checkpoint in fewer bits, which can be cut and unpacked. Each kind is a file
of its own here."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import torch

PROJECTION = re.compile(
    r".*(_proj|_proj_with_mqa|\.linear_attn\.in_proj_[qkvz]|\.(mamba|conv)\.in_proj_[a-z]+)\.weight"
)


def is_projection(name: str) -> bool:
    """Says if a checkpoint's tensor is a matrix of attention, a recurrent layer, an MLP or an expert: those
    are quantized. Embeddings, norms, the output head, a mixture's router and the numbers of a delta net's
    heads are not."""
    return PROJECTION.fullmatch(name) is not None


class QuantizedTensor(ABC):
    """[out, in] weights."""

    shape: tuple[int, int]

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Columns are cut at multiples of it. Elsewhere a cut goes through what shares a scale."""

    @abstractmethod
    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """[out, in] on `device`."""

    def fits(self, other: QuantizedTensor) -> bool:
        """Says if rows of both can be in one packed matrix."""
        return type(self) is type(other)

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows [start, stop)."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> QuantizedTensor:
        """Columns [start, stop). Raises CheckpointError if the cut goes through a group."""


class RowwiseTensor(QuantizedTensor):
    """A matrix whose rows can be moved while they stay packed: all kinds that GGUF files hold."""

    def __getitem__(self, rows: slice | list[int]) -> QuantizedTensor:
        if isinstance(rows, slice):
            return self.rows(rows.start, rows.stop)
        return self.take_rows(torch.tensor(rows))

    @abstractmethod
    def take_rows(self, index: torch.Tensor) -> QuantizedTensor:
        """A copy with these rows in this order."""
