"""Opens the GPU and computes Triton's key in threads, while Python imports the kernels: a start needs all
three, and each takes 0.3 to 0.4 s."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.engine.open_gpu import open_gpu
from shoal.kernels.ops import select_ops


def open_device_early(device: str) -> None:
    """Imports the kernels of the option `device`, while a thread makes the CUDA context, and another computes
    Triton's key (a hash of its own files), without which no kernel is found on disk. Does nothing without a
    GPU."""
    if not open_gpu(device):
        return
    import triton  # It is imported only now, because a CPU run must not pay for it.

    _compute_key_early(triton.runtime.cache)
    select_ops("cuda")


@functools.cache
def _compute_key_early(cache: Any) -> None:
    """Has a thread compute Triton's key. The module `cache` then waits for that thread: otherwise a look for
    a kernel in the meantime would compute the key once more."""
    if compute := getattr(cache, "triton_key", None):  # Triton before 3.6 has it elsewhere.
        thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-triton-key")
        cache.triton_key = thread.submit(compute).result
        thread.shutdown(wait=False)
