"""`open_device_early`: opens the GPU and computes Triton's key in threads, while Python imports torch and the
kernels. A start needs all of them. Torch-free."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal.engine.open_gpu import open_gpu


def open_device_early(device: str) -> None:
    """Has a thread make the CUDA context of the option `device`, and another compute Triton's key (a hash of
    its own files), without which no kernel is found on disk. Does nothing without a GPU. To be called before
    torch is imported: each takes 0.3 to 0.4 s."""
    if not open_gpu(device):
        return
    try:
        import triton  # It is imported only now, because a CPU run must not pay for it.
    except ImportError:  # The kernels' import raises it again, where a server's engine can report it.
        return
    _compute_key_early(triton.runtime.cache)


@functools.cache
def _compute_key_early(cache: Any) -> None:
    """Has a thread compute Triton's key. The module `cache` then waits for that thread: otherwise a look for
    a kernel in the meantime would compute the key once more."""
    if compute := getattr(cache, "triton_key", None):  # Triton before 3.6 has it elsewhere.
        thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-triton-key")
        cache.triton_key = thread.submit(compute).result
        thread.shutdown(wait=False)
