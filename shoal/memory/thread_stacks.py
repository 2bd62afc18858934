"""`ThreadStacks`: the memory that CUDA reserves on a GPU for the stacks of all threads that it can run, 1 KiB
for each: 0.26 GiB of an H200. Torch-free.

A process that has the GPU for its engine alone gives it back for sleep. In a user's process it stays, because
a graph that the user has captured would fail without it.
"""

from __future__ import annotations

import ctypes
import functools

STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE
OUT_OF_MEMORY = 2


class ThreadStacks:
    """The stacks of the current context. Between `release` and `take`, kernels get the stack that they were
    compiled with, but graphs that were captured before must not run, nor kernels of unknown depth."""

    def __init__(self) -> None:
        self.is_own_process = False  # whether no other code of this process uses the GPU
        self._size: int | None = None  # bytes a thread, while they are given back

    def release(self) -> None:
        """Gives the memory back if the process is the engine's own. Waits until the GPU has nothing to do."""
        if self.is_own_process and self._size is None:
            size = ctypes.c_size_t()
            _check(_driver().cuCtxGetLimit(ctypes.byref(size), STACK_SIZE))
            _check(_driver().cuCtxSetLimit(STACK_SIZE, ctypes.c_size_t(0)))
            self._size = size.value

    def take(self) -> None:
        """Takes the memory again if it was given back. Raises MemoryError, and nothing has changed then."""
        if self._size is not None:
            _check(_driver().cuCtxSetLimit(STACK_SIZE, ctypes.c_size_t(self._size)))
            self._size = None


STACKS = ThreadStacks()  # A process has one GPU.


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code == OUT_OF_MEMORY:
        raise MemoryError("the GPU has no memory left for the stacks of its threads")
    if code:
        raise RuntimeError(f"the stack size of the GPU's threads could not be changed: CUDA error {code}")
