"""A big host buffer of equal rows that becomes usable chunk by chunk: the first one at once, the rest while
threads touch and pin them in the background and the engine runs."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 128 << 20
THREADS = 8  # They pin memory, which one thread does at less than half the rate.
MADV_POPULATE_WRITE = 23
MAP_NORESERVE = 0x4000
PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister: pinned for every device, and readable by kernels


def forget_last_error() -> None:
    """Clears the error of a failed call of the CUDA runtime. It stays this thread's last error until then,
    and the next launch, whatever it is, would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").add_(1)


class HostSlab:
    """A buffer `rows`, uint8 [num_rows, row_bytes]. Only rows that `take_ready` has named may be touched.

    The rows are pinned for `device`. For the CPU they are all ready at once, and the system provides their
    memory when it is written. Raises MemoryError or OSError if no memory can be had.
    """

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        self._device = device
        self._memory = mmap.mmap(
            -1, max(1, num_rows * row_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
        with contextlib.suppress(OSError):  # The system's kernel may have no huge pages.
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # There is less to touch and to pin with them.
        self.rows = torch.frombuffer(self._memory, dtype=torch.uint8)[: num_rows * row_bytes].view(
            num_rows, row_bytes
        )
        self._ready: deque[tuple[int, int]] = deque()
        self._pinned: list[int] = []  # addresses
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._todo: deque[tuple[int, int]] = deque()  # chunks that are not pinned yet
        if device.type != "cuda":
            self._ready.append((0, num_rows))
            return
        # A chunk's last row ends where a page ends, because each chunk is pinned by itself.
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
        step *= max(1, CHUNK_BYTES // (step * row_bytes))
        self._todo.extend((start, min(start + step, num_rows)) for start in range(0, num_rows, step))
        # torch looks at the first byte alone to see if the whole buffer is pinned.
        if self._todo and not self._pin(*self._todo.popleft()):
            forget_last_error()
            raise MemoryError(
                "host memory for KV blocks could not be pinned (a limit on locked memory? see ulimit -l)"
            )

    def pin_rest(self) -> None:
        """Begins to pin what lies after the first chunk. Meanwhile the driver holds locks that other calls
        wait for, so figures of copies measured now would say little."""
        for i in range(min(THREADS, len(self._todo))):
            thread = threading.Thread(target=self._pin_all, name=f"kv-pin-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def take_ready(self) -> list[tuple[int, int]]:
        """Returns ranges [start, end) of rows that can be used from now on. Each comes once."""
        taken = []
        while self._ready:
            taken.append(self._ready.popleft())
        return taken

    def close(self) -> None:
        """Gives the memory back. No copy may be in flight, and the rows cannot be used afterwards."""
        self._closing = True
        for thread in self._threads:
            thread.join()
        if self._pinned:
            with ThreadPoolExecutor(
                THREADS, initializer=torch.cuda.set_device, initargs=(self._device,)
            ) as threads:
                list(threads.map(torch.cuda.cudart().cudaHostUnregister, self._pinned))
            self._pinned.clear()
        self.rows = torch.empty(0, 0, dtype=torch.uint8)

    def _pin_all(self) -> None:
        torch.cuda.set_device(self._device)  # Otherwise this thread would open a context on the first device.
        while not self._closing:
            try:
                start, end = self._todo.popleft()
            except IndexError:
                return
            if not self._pin(start, end):
                return

    def _pin(self, start: int, end: int) -> bool:
        rows = self.rows[start:end]
        address, size = rows.data_ptr(), rows.nbytes
        # Touches the pages. Otherwise pinning does it, more slowly.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE_AND_MAPPED))
        if code:
            logger.warning(
                "host memory for KV blocks could not be pinned (CUDA error %d; a limit on locked memory? "
                "see ulimit -l): the host tier stays smaller than asked for",
                code,
            )
            return False
        self._pinned.append(address)
        self._ready.append((start, end))
        return True
