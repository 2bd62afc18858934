"""Files as storages: mapped into memory (`mapped_file`), or past the page cache (`DirectFile`)."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref

import numpy as np
import torch

from shoal.kv.storage import ALIGNMENT, Kind, Memory, Storage, StorageError, check_size, tensor_over

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 4 << 20


class DirectFile(Storage):
    """A file that is read and written past the page cache (O_DIRECT), through an aligned buffer. The file is
    made at once, with all its space. If its filesystem has no direct I/O, `direct` is False, a warning is
    logged, and the page cache takes part."""

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        check_size(num_bytes)
        super().__init__(Kind.DIRECT, num_bytes, torch.device("cpu"))
        self.path, self.direct = os.fspath(path), True
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        try:
            self._fd = _open_file(self.path, size, os.O_DIRECT)
        except StorageError as error:
            if getattr(error.__cause__, "errno", 0) != errno.EINVAL:
                raise
            self.direct = False
            self._fd = _open_file(self.path, size)
            logger.warning("the filesystem of %s has no direct I/O: the page cache takes part", self.path)
        self._bounce = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)
        self._lock = threading.Lock()
        self._close_fd = weakref.finalize(self, os.close, self._fd)

    @property
    def address(self) -> int:
        return 0

    def tensor(self) -> torch.Tensor:
        raise StorageError(
            f"{self.path} is a direct-I/O file, which has no memory to share: copy it (`copy_to`), or map "
            "the file instead"
        )

    def read(self, offset: int, into: np.ndarray) -> None:
        self._move(offset, into, False)

    def write(self, offset: int, data: np.ndarray) -> None:
        self._move(offset, data, True)

    def _move(self, offset: int, data: np.ndarray, write: bool) -> None:
        end = offset + data.nbytes
        with self._lock:
            self.check(offset, data.nbytes)  # in here: a closed descriptor may be another file's
            for low in range(offset // ALIGNMENT * ALIGNMENT, end, BOUNCE_BYTES):
                high = min(-(-end // ALIGNMENT) * ALIGNMENT, low + BOUNCE_BYTES)
                start, stop = max(offset, low), min(end, high)
                page, part = self._bounce[: high - low], data[start - offset : stop - offset]
                if not write or (start, stop) != (low, high):  # the rest of these pages is written back
                    self._transfer(os.preadv, page, low)
                if write:
                    page[start - low : stop - low] = part
                    self._transfer(os.pwritev, page, low)
                else:
                    part[:] = page[start - low : stop - low]

    def _transfer(self, call: object, page: np.ndarray, offset: int) -> None:
        assert callable(call)
        try:
            moved = call(self._fd, [page.data], offset)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror} at byte {offset}") from None
        if moved != page.nbytes:
            raise StorageError(
                f"{self.path}: {moved} of {page.nbytes} bytes at byte {offset} were moved: was the file cut "
                "off?"
            )

    def _free(self) -> None:
        with self._lock:
            self._close_fd()


def mapped_file(path: str | os.PathLike[str], num_bytes: int) -> Memory:
    """The first `num_bytes` of a file, which is made, or made longer, if need be. The system decides when
    what is written reaches the file. Raises StorageError."""
    check_size(num_bytes)
    fd = _open_file(os.fspath(path), num_bytes)
    try:
        pages = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    return Memory(Kind.MAPPED, tensor_over((ctypes.c_uint8 * num_bytes).from_buffer(pages)))


def _open_file(path: str, num_bytes: int, flags: int = 0) -> int:
    """Returns a descriptor of a file of `num_bytes` or more. Raises StorageError if there is no space for
    them, and then leaves the file as long as it was."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        before = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError:
            os.ftruncate(fd, before)
            os.close(fd)
            raise
    except OSError as error:
        raise StorageError(f"{path} cannot hold {num_bytes} bytes: {error.strerror}") from error
    return fd
