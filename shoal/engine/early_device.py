"""Opens the GPU, and has Triton hash itself while Python imports kernels: a start needs all three, and each
takes 0.3 to 0.4 s."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from shoal.kernels.ops import select_ops


def open_device_early(device: str) -> None:
    """Imports the kernels of the option `device`, while a thread makes the CUDA context of GPU 0, which torch
    takes over, and another computes Triton's key of its own libraries, which every look for a kernel on disk
    needs. Both work without Python's lock. Without a GPU nothing is done: what is wrong is found, and
    reported, where the GPU is used."""
    if device == "cpu" or torch.version.cuda is None:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    _in_thread(_open, driver)
    import triton  # It is imported only now, because a CPU run must not pay for it.

    if key := getattr(triton.runtime.cache, "triton_key", None):  # Triton before 3.6 has it elsewhere.
        _in_thread(key)
    select_ops("cuda")


def _in_thread(work: Callable[..., Any], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="shoal-open-device", daemon=True).start()


def _open(driver: ctypes.CDLL) -> None:
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
