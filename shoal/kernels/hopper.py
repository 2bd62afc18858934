"""What the kernels written for Hopper in Gluon (Triton's language of warps and layouts) share. Importing it asks for no Gluon."""

from __future__ import annotations

import torch
import triton

HAS_GLUON = triton.__version__.startswith(("3.6", "3.7"))    # it is experimental: those that are known to make these kernels

if HAS_GLUON:
    from triton.experimental.gluon import language as gl

    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier    # of a program's threads; its name before Triton 3.7


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
