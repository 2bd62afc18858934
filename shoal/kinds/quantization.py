"""Quantization: how a checkpoint's matrices are stored, from its config. models/layouts/ has a file for each
layout. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a checkpoint's matrices, from its config. models/layouts/ has a file for each
    layout."""

    layout: str  # the name of a layout in models/layouts/registry.py
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale; 0: all
    zero_points: bool = False  # each scale has a zero point
    act_order: bool = False  # a tensor has the group of each input
    zeros_minus_one: bool = False  # zero points are stored minus one
    others: tuple[Quantization, ...] = ()  # how further matrices are stored, where not all are alike

    @property
    def every(self) -> tuple[Quantization, ...]:
        """Returns this layout and the others."""
        return (self, *self.others)
