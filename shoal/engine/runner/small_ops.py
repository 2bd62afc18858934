"""Copies between host and device that wait for nothing, and `few_threads`, for what runs outside of captured
steps on few elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FEW_ELEMENTS = 1 << 22  # One thread takes some milliseconds for an operation on as many.


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies from the host, without waiting for what the device does."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def start_copy(x: torch.Tensor) -> torch.Tensor:
    """Starts a copy to the host. It is complete when an event recorded after this call has passed."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@contextmanager
def few_threads(device: torch.device, num_elements: int) -> Iterator[None]:
    """On a CPU, PyTorch's operations on few elements run on one thread inside this context.

    PyTorch's threads meet at the end of each operation. Where another process has the core of one of them,
    all wait, and next to a busy process that was most of a constrained token's time. Threads save such
    operations next to nothing.
    """
    if device.type != "cpu" or num_elements > FEW_ELEMENTS:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
