"""Additions to the attention of a layer, by numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The factor of q at a position: 1 + beta * ln(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class OutputGate:
    """The output of attention is multiplied by `activation` of a matmul with the layer's normed input."""

    activation: str  # "sigmoid" or "softplus"
    per_head: bool = False  # one number for each head, instead of one for each of its numbers
    tensor: str = "gate_proj"  # the matrix's name in a checkpoint
