"""Shared parts of the kernels that are written for Hopper in Gluon, Triton's language of warps and layouts.
Importing this file needs no Gluon."""

from __future__ import annotations

import functools

import torch
import triton

MAX_ROWS = 256  # Matmuls of hopper_linear.py have no more rows.
# Gluon is experimental. These are the versions that are known to make these kernels.
HAS_GLUON = triton.__version__.startswith(("3.6", "3.7"))

if HAS_GLUON:
    from triton.experimental.gluon import language as gl

    # A barrier of a program's threads. Before Triton 3.7 its name was thread_barrier.
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    # Makes a class of a kernel's values; its methods are `gluon.jit`. Gluon takes it from there itself.
    aggregate = triton.language.core._aggregate


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def has_large_shared_memory() -> bool:
    """Says if a program may have 227 KB, as from Hopper on, or about two thirds of that."""
    return _INTERPRETED or _is_hopper_or_newer(triton.runtime.driver.active.get_current_device())


_INTERPRETED = triton.knobs.runtime.interpret  # the value that `triton.jit` sees in this process


@functools.cache
def _is_hopper_or_newer(device: int) -> bool:
    return triton.runtime.driver.active.get_current_target().arch >= 90


def rows_with_room(rows: int) -> int:
    """Returns the number of rows that a matmul's input of `rows` rows has memory for: a power of two, at
    least 8. hopper_linear.py gets at most MAX_ROWS rows, so that is the bound."""
    return rows if rows > MAX_ROWS else max(8, 1 << (rows - 1).bit_length())


def empty_matmul_input(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An empty [T, ...] that a matmul will read, in memory for `rows_with_room` rows.

    The matmuls of hopper_linear.py read whole tiles of rows by TMA, which is slow to fill in zeros for rows
    beyond a matrix. So they read the memory after these rows instead, for sums that nobody stores. An input
    without such room is answered right, but more slowly: whatever writes a matmul's input should get it from
    here.
    """
    rows = shape[0]
    room = rows_with_room(rows)
    if room == rows:
        return like.new_empty(shape)
    return like.new_empty((room, *shape[1:]))[:rows]
