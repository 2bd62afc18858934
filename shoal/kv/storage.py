"""Storages: memory for the bytes of KV blocks, and its lifetime. Files: kv/library/files.py.

A storage knows the views over it (view.py) and the copies in flight (copy.py), and refuses to be closed under
them. Tensors and arrays made from a storage keep its memory by themselves, even when it has been closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from enum import StrEnum

import numpy as np
import torch

from shoal.errors import UserError
from shoal.memory.available import available_bytes
from shoal.memory.slab import PORTABLE_AND_MAPPED, forget_last_error

ALIGNMENT = 4096  # direct I/O needs it for offsets, sizes and addresses
KEY_BYTES = 16  # by which other processes know that shared memory is the one they mean
F_SEAL_FUTURE_WRITE = 0x0010  # Python 3.11's fcntl has no name for it


class StorageError(UserError):
    """A storage that can't exist, or can't be used in this way."""


class NotEnoughMemoryError(StorageError):
    """More host memory was asked for than the machine, or this process's control group, has left."""


class StorageInUseError(StorageError):
    """The storage can't be closed, because views or copies use it."""


class StorageClosedError(StorageError):
    """The storage has been closed."""


class Kind(StrEnum):
    DEVICE = "device"
    PINNED = "pinned"  # host memory that devices read and write in place
    HOST = "host"
    MAPPED = "mapped"  # a file that looks like host memory
    DIRECT = "direct"  # a file past the page cache; it has no address


class Storage(ABC):
    """`num_bytes` bytes of a kind. Offsets are in bytes."""

    def __init__(self, kind: Kind, num_bytes: int, device: torch.device) -> None:
        self.kind, self.num_bytes, self.device = kind, num_bytes, device
        self.closed = False
        self.users: weakref.WeakSet[object] = weakref.WeakSet()  # views
        self.shared: SharedPages | None = None  # how other processes map it, if they can
        self.is_far = False  # True: `device`, a GPU, reaches it over a link to another GPU

    @property
    @abstractmethod
    def address(self) -> int:
        """The address of the first byte; 0 for a file that has none, whose addresses are offsets."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The whole storage as uint8 [num_bytes], without a copy. Raises StorageError if it has no memory."""

    @abstractmethod
    def read(self, offset: int, into: np.ndarray) -> None:
        """Fills `into`, which is contiguous uint8, and returns when that is done. Raises StorageError."""

    @abstractmethod
    def write(self, offset: int, data: np.ndarray) -> None:
        """Writes `data`, which is contiguous uint8, and returns when that is done. Raises StorageError."""

    @abstractmethod
    def _free(self) -> None: ...

    def close(self) -> None:
        """Does nothing if the storage is closed already. Raises StorageInUseError."""
        if self.closed:
            return
        in_flight.release_done()
        if self.users:
            raise StorageInUseError(
                f"a storage of {self.num_bytes} bytes ({self.kind}) cannot be closed: {len(self.users)} "
                "views over it live, or copies in flight hold them; drop those first"
            )
        self.closed = True
        self._free()

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, offset: int = 0, num_bytes: int = 0) -> None:
        """Raises StorageError unless the storage is open and has these bytes."""
        if self.closed:
            raise StorageClosedError(f"a storage of {self.num_bytes} bytes ({self.kind}) was closed")
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise StorageError(
                f"bytes {offset} to {offset + num_bytes} are not all in a storage of {self.num_bytes} bytes"
            )


class Memory(Storage):
    """A storage that has addresses: a tensor's memory."""

    def __init__(self, kind: Kind, tensor: torch.Tensor) -> None:
        super().__init__(kind, tensor.shape[0], tensor.device)
        self._tensor: torch.Tensor | None = tensor

    @property
    def address(self) -> int:
        return self.tensor().data_ptr()

    def tensor(self) -> torch.Tensor:
        self.check()
        assert self._tensor is not None
        return self._tensor

    def read(self, offset: int, into: np.ndarray) -> None:
        self.check(offset, into.nbytes)
        torch.from_numpy(into).copy_(self.tensor()[offset : offset + into.nbytes])

    def write(self, offset: int, data: np.ndarray) -> None:
        self.check(offset, data.nbytes)
        self.tensor()[offset : offset + data.nbytes].copy_(torch.from_numpy(data))

    def _free(self) -> None:
        self._tensor = None


def device_memory(num_bytes: int, device: torch.device | str = "cuda") -> Memory:
    """Raises torch.OutOfMemoryError."""
    check_size(num_bytes)
    return Memory(Kind.DEVICE, torch.empty(num_bytes, dtype=torch.uint8, device=device))


def host_memory(num_bytes: int) -> Memory:
    """Zeros, in pages of the system's choice. Raises NotEnoughMemoryError."""
    return Memory(Kind.HOST, tensor_over(_pages(num_bytes)))


class SharedPages:
    """Anonymous memory that other processes of this user can map, read-only, through `fd`. After its
    `num_bytes` bytes, at `key_offset`, is a key of KEY_BYTES, all zeros until it is written."""

    def __init__(self, num_bytes: int) -> None:
        self.key_offset = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        try:
            self.fd = os.memfd_create("shoal-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._close_fd = weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, self.key_offset + ALIGNMENT)
            self.pages = mmap.mmap(self.fd, 0)
            # It keeps its size, as a reader of pages that are gone would end. From now on it is mapped
            # read-only. A kernel older than 5.1 does not know the second.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        except OSError as error:
            raise StorageError(
                f"{num_bytes} bytes of shared memory cannot be had: {error.strerror}; is there a limit on "
                "memory or on open files (ulimit -n)?"
            ) from None

    def read_key(self) -> bytes:
        return self.pages[self.key_offset : self.key_offset + KEY_BYTES]

    def write_key(self, key: bytes) -> None:
        self.pages[self.key_offset : self.key_offset + KEY_BYTES] = key


def shared_memory(num_bytes: int) -> Memory:
    """Zeros that other processes of this user on this host can read (`Memory.shared`). They have no name in
    any folder, and end with the last process that maps them. Raises NotEnoughMemoryError, and StorageError if
    the system gives none."""
    _check_free(num_bytes)
    shared = SharedPages(num_bytes)
    array = (ctypes.c_uint8 * num_bytes).from_buffer(shared.pages)
    array.owner = shared  # type: ignore[attr-defined]
    memory = Memory(Kind.HOST, tensor_over(array))
    memory.shared = shared
    return memory


def pinned_memory(num_bytes: int) -> Memory:
    """Zeros in host memory that is registered with CUDA. It takes exactly `num_bytes`, while torch rounds the
    size of its own pinned memory up to a power of two. Raises StorageError without a GPU, and
    NotEnoughMemoryError."""
    if not torch.cuda.is_available():
        raise StorageError("pinned memory needs a GPU: use host_memory")
    pages = _pages(num_bytes)
    tensor = tensor_over(pages)
    tensor.zero_()  # touched by all threads, which pinning would do with one
    torch.cuda.init()
    code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, PORTABLE_AND_MAPPED)
    if int(code):
        forget_last_error()
        raise StorageError(
            f"{num_bytes} bytes of host memory cannot be pinned ({code}): is there a limit on locked memory "
            "(ulimit -l)?"
        )
    weakref.finalize(pages, _unpin, tensor.data_ptr()).atexit = False
    return Memory(Kind.PINNED, tensor)


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a tensor, from its first item to its last. Raises StorageError if it has no items."""
    if not tensor.numel():
        raise StorageError(f"a tensor of shape {tuple(tensor.shape)} has no memory")
    num_items = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    item = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (num_items * item,), (1,))  # type: ignore[call-overload]
    return Memory(Kind.DEVICE if tensor.is_cuda else Kind.PINNED if tensor.is_pinned() else Kind.HOST, flat)


class InFlight:
    """Keeps alive what copies use until a device has finished them."""

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()
        self._lock = threading.RLock()  # a release may end in another call

    def keep(self, event: torch.cuda.Event, *used: object) -> None:
        """Keeps what a copy uses until its event has completed, and some time longer unless `release_done`
        is called."""
        with self._lock:
            while self._kept and self._kept[0][0].query():
                self._kept.popleft()
            self._kept.append((event, used))

    def release_done(self) -> None:
        """Releases everything whose event has completed."""
        with self._lock:
            self._kept = deque(entry for entry in self._kept if not entry[0].query())


in_flight = InFlight()


def check_size(num_bytes: int) -> None:
    if num_bytes < 1:
        raise StorageError(f"num_bytes must be 1 or more, got {num_bytes}")


def _check_free(num_bytes: int) -> None:
    check_size(num_bytes)
    if num_bytes > (free := available_bytes()):
        raise NotEnoughMemoryError(
            f"{num_bytes / 2**30:.2f} GiB of host memory were asked for, but only {free / 2**30:.2f} GiB "
            "are free: ask for less, or end what else uses it"
        )


def _pages(num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
    _check_free(num_bytes)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    return (ctypes.c_uint8 * num_bytes).from_buffer(pages)


def tensor_over(pages: ctypes.Array[ctypes.c_uint8]) -> torch.Tensor:
    """The tensor keeps the array, which keeps the map. torch would not keep a bare map open."""
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
