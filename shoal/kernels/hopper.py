"""What the kernels written for Hopper in Gluon (Triton's language of warps and layouts) share. Importing it
asks for no Gluon."""

from __future__ import annotations

import torch
import triton

MAX_ROWS = 256  # of hopper_linear.py's products
# it is experimental: those that are known to make these kernels
HAS_GLUON = triton.__version__.startswith(("3.6", "3.7"))

if HAS_GLUON:
    from triton.experimental.gluon import language as gl

    # of a program's threads; its name before Triton 3.7
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def empty_rows(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An empty [T, ...]; up to MAX_ROWS with memory for a power of two of rows, at least 8. hopper_linear.py
    reads tiles of rows by TMA, which is slow to fill in zeros for rows beyond a matrix: 1024 x 3072 of 208
    rows 10.2 us, 7.5 where there is something to read."""
    rows = shape[0]
    if rows > MAX_ROWS or rows == (room := max(8, 1 << (rows - 1).bit_length())):
        return like.new_empty(shape)
    return like.new_empty((room, *shape[1:]))[:rows]
