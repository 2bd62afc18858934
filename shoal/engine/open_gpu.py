"""`open_gpu`: makes the CUDA context, which takes 0.3 to 0.5 s, in a thread. Torch-free."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from pathlib import Path

DEV = Path("/dev")
GPU_NODES = ("nvidia[0-9]*", "dxg", "nvgpu", "nvhost-gpu")  # a host's or container's, WSL's, Jetson's


@functools.cache
def open_gpu(device: str) -> bool:
    """Starts a thread that makes the context of GPU 0, which torch takes over, if the option `device` may
    mean a GPU: torch is built for CUDA, and there are a driver and, unless the option names one, a GPU. A
    second call starts none. Returns whether a thread was started. It works without Python's lock, and ignores
    errors: the first use of the GPU reports them."""
    if device == "cpu" or not _is_torch_for_cuda() or (device == "auto" and not _may_see_gpu()):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it opens the driver
    threading.Thread(target=_open, args=(driver,), name="shoal-open-gpu").start()
    return True


def _is_torch_for_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and _cuda_library(spec.origin).exists()


def _cuda_library(torch: str) -> Path:
    return Path(torch).parent / "lib" / "libtorch_cuda.so"


def _may_see_gpu() -> bool:
    """Returns whether this process may see a GPU, without the driver, which takes long to say so: a driver's
    library may be installed without a GPU, or the process may use none of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return False
    return any(next(DEV.glob(nodes), None) is not None for nodes in GPU_NODES)


def _open(driver: ctypes.CDLL) -> None:
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
