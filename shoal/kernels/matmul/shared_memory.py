"""The shared memory that a program of a matmul can have."""

from __future__ import annotations

import functools

import torch
import triton


def fitting_stages(num_stages: int, stage_bytes: int, device: torch.device) -> int:
    """Returns the number of pipeline stages that fit. On many cards a program has no more than 99 KB of
    shared memory. A pipeline buffers one stage less than it has."""
    if device.type != "cuda":  # interpreted
        return num_stages
    return max(
        1,
        min(num_stages, 1 + _shared_memory(triton.runtime.driver.active.get_current_device()) // stage_bytes),
    )


@functools.cache
def _shared_memory(device: int) -> int:
    """The bytes of shared memory that a program can have, as Triton itself asks for them."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
