"""Calls of the CUDA driver, in the context of a device that torch uses too. A thread that has never called
the CUDA runtime has no context of its own. Processes map each other's memory by CUDA IPC."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


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
    """Returns the device's primary context, retained to the end of the process."""
    number, primary = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", ctypes.c_uint(0))
    call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), number)
    return primary


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def allocation_of(device: int, address: int) -> tuple[int, int]:
    """Returns the start and the size in bytes of the allocation that contains an address."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    with context(device):
        call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
    return start.value, size.value


def export_memory(device: int, address: int) -> bytes:
    """Returns a handle of the allocation that contains an address, for other processes. Raises
    DriverError."""
    handle = _Handle()
    with context(device):
        call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def open_memory(device: int, handle: bytes) -> int:
    """Maps another process's allocation and returns its address here. The driver counts how often it was
    opened. Raises DriverError."""
    start = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    with context(device):
        call("cuIpcOpenMemHandle_v2", ctypes.byref(start), given, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
    return start.value


def close_memory(device: int, opened: list[int]) -> None:
    with contextlib.suppress(DriverError), context(device):
        while opened:
            call("cuIpcCloseMemHandle", ctypes.c_uint64(opened.pop()))
