"""The host buffers that hold the content of paused regions."""

from __future__ import annotations

import logging

from shoal.memory.library import HostUsage, Status, error_of, load

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
THREADS = 8  # They touch and pin memory, which one thread does at less than half the rate.


class HostBuffers:
    """Chunks of host memory. Threads of the C library touch and pin them in the background, and one pause
    after the other uses them."""

    def __init__(self, driver: int, device: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._library = load()
        self.handle = self._library.shoal_host_open(driver, device, chunk_bytes, THREADS)
        self.chunk_bytes = chunk_bytes
        self._warned = False

    def prepare(self, num_bytes: int) -> None:
        """Starts to prepare chunks for `num_bytes`, and returns at once. `wait` waits for them. Raises
        MemoryError if the system has no memory or no threads for that."""
        status = Status()
        if self._library.shoal_host_prepare(self.handle, num_bytes, status):
            raise error_of(status)

    def wait(self) -> None:
        """Waits until every chunk is ready or has failed."""
        self._library.shoal_host_wait(self.handle)
        self.warn_of_plain()

    def usage(self) -> dict[str, int]:
        """Returns bytes by state. "bytes" counts all chunks; "ready", "pinned", "used" and "failed" count
        those in that state."""
        usage = HostUsage()
        self._library.shoal_host_usage(self.handle, usage)
        return {name: getattr(usage, name) for name in ("bytes", "ready", "pinned", "used", "failed")}

    def missing(self, num_bytes: int) -> int:
        """Returns how many bytes a pause that keeps `num_bytes` would still have to take from the system."""
        usage = self.usage()
        chunks = -(-num_bytes // self.chunk_bytes)
        return max(0, chunks * self.chunk_bytes - (usage["ready"] - usage["used"]))

    def warn_of_plain(self) -> None:
        """Warns, once, if some of the memory could not be pinned."""
        usage = self.usage()
        if usage["pinned"] < usage["ready"] and not self._warned:
            self._warned = True
            logger.warning(
                "%.2f GiB of host buffers could not be pinned (a limit on locked memory? see ulimit -l), so "
                "they are plain memory: going to sleep and waking up are slower",
                (usage["ready"] - usage["pinned"]) / 2**30,
            )

    def trim(self) -> None:
        """Gives chunks that nothing uses back to the system."""
        self._library.shoal_host_trim(self.handle)

    def close(self) -> None:
        self._library.shoal_host_close(self.handle)
