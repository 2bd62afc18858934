"""Opens the GPU while Python imports kernels: an engine's start needs both, and either takes 0.3 s."""

from __future__ import annotations

import ctypes
import threading

import torch

from shoal.kernels.ops import select_ops


def open_device_early(device: str) -> None:
    """Imports the kernels of the option `device`, while a thread makes the CUDA context of GPU 0, which torch
    takes over. Without a GPU nothing is done: what is wrong is found, and reported, where the GPU is used."""
    if device == "cpu" or torch.version.cuda is None:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    threading.Thread(target=_open, args=(driver,), name="shoal-open-device", daemon=True).start()
    select_ops("cuda")


def _open(driver: ctypes.CDLL) -> None:
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
