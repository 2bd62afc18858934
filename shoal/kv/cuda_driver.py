"""Calls of the CUDA driver, in the context of a device that torch uses too. A thread that has never called
the CUDA runtime has no context of its own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator


class DriverError(Exception):
    """A call of the CUDA driver failed."""


def call(name: str, *arguments: object) -> None:
    """Calls a function of libcuda. Arguments are ctypes' own, as no signatures are declared. Raises
    DriverError with the function's name and the driver's code."""
    code = getattr(_library(), name)(*arguments)
    if code:
        raise DriverError(f"{name} failed: the CUDA driver's error {code}")


@contextlib.contextmanager
def context(device: int) -> Iterator[None]:
    """The calling thread's calls are about this device meanwhile."""
    call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """It is kept to the end of the process."""
    number, primary = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", ctypes.c_uint(0))
    call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), number)
    return primary
