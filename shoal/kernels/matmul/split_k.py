"""Counters of split-K matmuls, whose inputs are split over programs: a tile's last program adds the parts."""

from __future__ import annotations

import functools

import torch


@functools.cache
def arrival_counters(kernel: str, num_tiles: int, device: torch.device) -> torch.Tensor:
    """Returns the counters of a kernel's finished parts, one per tile. Every launch leaves zeros, which the
    next one counts on. So launches on one device must follow each other."""
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)
