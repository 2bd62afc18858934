"""The C library of vmm*.c: how it is built and loaded, its structs and its errors."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.kernels import c_library

FOLDER = Path(__file__).parent
SOURCES = ("vmm.c", "vmm_sleep.c", "vmm_host.c", "vmm_cuda.c", "vmm_acl.c")
HEADERS = ("vmm.h",)
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-pthread")
DEVICE_MEMORY, HOST_MEMORY = 1, 2  # values of Status.kind


class Status(ctypes.Structure):
    """The struct of this name in vmm.h. The classes below are structs of vmm.h and of the sources."""

    _fields_ = (("kind", c_int32), ("code", c_int32), ("bytes", c_int64), ("text", c_char * 240))


class Range(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("size", c_int64))


class Job(ctypes.Structure):
    _fields_ = (("region", c_void_p), ("keep", c_int32), ("ranges", POINTER(Range)), ("num_ranges", c_int64))


class Moved(ctypes.Structure):
    _fields_ = (
        ("freed", c_int64),
        ("taken", c_int64),
        ("copied", c_int64),
        ("queued", c_double),
        ("pieces", c_double),
        ("end", c_double),
    )


class RegionUsage(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("allocated", "mapped", "host", "pieces", "paused"))


class HostUsage(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("bytes", "ready", "pinned", "used", "failed"))


SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "shoal_driver_open": (c_void_p, (c_int, c_char_p, POINTER(Status))),
    "shoal_region_open": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64, POINTER(Status))),
    "shoal_region_close": (c_int64, (c_void_p,)),
    "shoal_region_slot": (c_int, (c_void_p,)),
    "shoal_region_failure": (None, (c_void_p, POINTER(Status))),
    "shoal_region_usage": (None, (c_void_p, POINTER(RegionUsage))),
    "shoal_process_usage": (None, (c_void_p, c_int, POINTER(RegionUsage))),
    "shoal_region_malloc": (c_void_p, (c_void_p, c_int64, POINTER(Status))),
    "shoal_free": (None, (c_void_p, c_int64, c_int, c_void_p)),
    "shoal_host_open": (c_void_p, (c_void_p, c_int, c_int64, c_int)),
    "shoal_host_prepare": (c_int, (c_void_p, c_int64, POINTER(Status))),
    "shoal_host_wait": (None, (c_void_p,)),
    "shoal_host_usage": (None, (c_void_p, POINTER(HostUsage))),
    "shoal_host_trim": (None, (c_void_p,)),
    "shoal_host_close": (None, (c_void_p,)),
    "shoal_pause": (c_int, (POINTER(Job), c_int, c_void_p, c_int, c_int, POINTER(Moved), POINTER(Status))),
    "shoal_resume": (c_int, (POINTER(Job), c_int, c_int, c_int, POINTER(Moved), POINTER(Status))),
}


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the library, compiled on first use. Where that fails, the one built when the package was
    installed. Raises ConfigError without either."""
    try:
        path = c_library.build(FOLDER, SOURCES, HEADERS, FLAGS, ("-ldl",))
    except c_library.BuildError as error:
        built = sorted(FOLDER.glob("_vmm*.so"))
        if not built:
            raise ConfigError(
                f"memory that can be given back needs a small C library, which can't be built here: {error}"
            ) from error
        path = built[0]
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def error_of(status: Status) -> Exception:
    """Returns what a failed call raises: torch.OutOfMemoryError if the device's memory is short, MemoryError
    if the host's is, and RuntimeError for everything else."""
    text = status.text.decode(errors="replace")
    if status.kind == DEVICE_MEMORY:
        return torch.OutOfMemoryError(text)
    return MemoryError(text) if status.kind == HOST_MEMORY else RuntimeError(text)


@functools.cache
def open_driver(ascend: bool, path: str | None = None) -> int:
    """Returns a handle of the driver, which a process opens once: Ascend's, or CUDA's. `path` is another
    library than the driver's usual one. Raises ConfigError if there is no such driver."""
    status = Status()
    driver = load().shoal_driver_open(ascend, path.encode() if path else None, status)
    if not driver:
        raise ConfigError(f"memory that can be given back needs a GPU's driver: {error_of(status)}")
    return driver
