"""`Pieces`: what a layer on several ranks leaves to add to the residual after a large step, while the sums of
its rows over the ranks run during the matmuls."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class PieceSum(Protocol):
    """The sum over the ranks of a piece of rows. It is finished once, by one of the two, and pieces in the
    order in which they were begun."""

    def add(self, residual_TD: torch.Tensor) -> None:
        """residual += the sum, in place."""

    def add_rms_norm(self, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """The same; returns the norm of the new residual."""


class LargeSums(Protocol):
    """Sums of many rows over the ranks (engine/ranks/peer_copies.py). What it takes depends on shapes alone,
    as all ranks must decide alike."""

    def pieces(self, num_rows: int) -> list[slice]:
        """The rows of each piece of a step. Empty: such a step is not for pieces."""

    def begin(self, part_TD: torch.Tensor) -> PieceSum:
        """Begins to sum the ranks' parts of a piece."""


class Piece(NamedTuple):
    rows: slice
    sum: PieceSum


class Pieces(NamedTuple):
    """All rows of a step. They are added to the residual once, on all ranks."""

    pieces: list[Piece]

    def add_to(self, residual_TD: torch.Tensor) -> None:
        """residual += the sums over the ranks, in place."""
        for rows, piece in self.pieces:
            piece.add(residual_TD[rows])
