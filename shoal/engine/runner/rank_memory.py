"""One rank's weights and KV cache as memory that can be given back and taken again at the same addresses.

On a GPU it lies in regions of shoal/memory, the graphs' own memory with the cache; on the CPU in ordinary
memory whose pages are dropped.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.api import MemoryReport
from shoal.memory.regions import Regions

logger = logging.getLogger(__name__)

MADV_DONTNEED = 4


class CpuRegions:
    """Tensors in ordinary memory, by tag. Released, their pages go back to the kernel and read as zeros from
    then on; what is kept stays where it is. Without sleep mode this only counts."""

    def __init__(self) -> None:
        self._tensors: dict[str, Callable[[], Iterable[torch.Tensor]]] = {}
        self._asleep: dict[str, bool] = {}  # tag -> whether its content is kept

    def holding(self, tag: str) -> AbstractContextManager[None]:
        """Tensors that are made meanwhile lie in the region."""
        return nullcontext()

    def adopt(self, tag: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Names the tensors of a region."""
        self._tensors[tag] = tensors

    def release(self, tags: list[str], kept: list[str]) -> dict[str, int]:
        freed = 0
        for tag in tags:
            if self._asleep.get(tag, True) and tag not in kept:
                for tensor in self._tensors[tag]():
                    drop_pages(tensor)
                freed += self._size(tag)
            self._asleep[tag] = self._asleep.get(tag, True) and tag in kept
        return self._report(freed_bytes=freed)

    def take(self, tags: list[str]) -> dict[str, int]:
        taken = sum(self._size(tag) for tag in tags if self._asleep.pop(tag, True) is False)
        return self._report(taken_bytes=taken)

    def usage(self) -> dict[str, dict[str, int]]:
        return {
            tag: {
                "device_bytes": 0 if tag in self._asleep else self._size(tag),
                "reserved_bytes": self._size(tag),
                "host_bytes": self._size(tag) if self._asleep.get(tag) else 0,
                "ready_bytes": 0,
            }
            for tag in self._tensors
        }

    def in_use(self) -> dict[str, int]:
        """Device memory in use: in all, in regions, by PyTorch elsewhere. Here regions alone are counted."""
        mapped = sum(entry["device_bytes"] for entry in self.usage().values())
        return {"in_use_bytes": mapped, "region_bytes": mapped, "process_bytes": 0}

    def graph_pool(self, tag: str) -> tuple[int, int] | None:
        """Where a graph's own memory comes from. None: wherever."""
        return None

    def prepare_host(self) -> None:
        """Has what a sleep needs on the host made ready in the background."""

    def wait_for_host(self) -> float:
        """Until that is ready. Seconds since it began."""
        return 0.0

    def close(self) -> None:
        self._tensors = {}

    def _size(self, tag: str) -> int:
        return sum(tensor.nbytes for tensor in self._tensors[tag]())

    def _report(self, freed_bytes: int = 0, taken_bytes: int = 0) -> dict[str, int]:
        return {
            "freed_bytes": freed_bytes,
            "taken_bytes": taken_bytes,
            "host_bytes": sum(entry["host_bytes"] for entry in self.usage().values()),
            **self.in_use(),
        }


class GpuRegions:
    """The same for a GPU with sleep mode."""

    def __init__(self) -> None:
        self._regions = Regions("cuda")
        self._began = 0.0

    def holding(self, tag: str) -> AbstractContextManager[None]:
        return self._regions.region(tag, offload=tag == "weights")

    def adopt(self, tag: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Nothing to do: a region knows what lies in it."""

    def release(self, tags: list[str], kept: list[str]) -> dict[str, int]:
        return _figures(self._regions.pause(tags, kept))

    def take(self, tags: list[str]) -> dict[str, int]:
        return _figures(self._regions.resume(tags))

    def usage(self) -> dict[str, dict[str, int]]:
        buffers = self._regions.host_usage()
        ready = max(0, buffers["ready"] - buffers["used"])
        usage = self._regions.usage().items()
        tags = {tag: entry | {"ready_bytes": ready if tag == "weights" else 0} for tag, entry in usage}
        return tags | {"device": self.in_use()}

    def in_use(self) -> dict[str, int]:
        return self._regions.in_use()

    def graph_pool(self, tag: str) -> tuple[int, int] | None:
        return self._regions.graph_pool(tag)

    def prepare_host(self) -> None:
        self._began = time.perf_counter()
        try:
            self._regions.prepare_host()
        except MemoryError as error:
            logger.warning("a sleep at level 1 will have no room for the weights, level 2 will do: %s", error)

    def wait_for_host(self) -> float:
        self._regions.prepare_host(wait=True)
        return time.perf_counter() - self._began

    def close(self) -> None:
        self._regions.close()


def _figures(report: MemoryReport) -> dict[str, int]:
    figures = dataclasses.asdict(report)
    del figures["seconds"]
    return figures


def drop_pages(tensor: torch.Tensor) -> None:
    """Gives a CPU tensor's memory back to the kernel, whole pages of it; all of it reads as zeros then."""
    assert tensor.is_contiguous()
    start, size, page = tensor.data_ptr(), tensor.nbytes, mmap.PAGESIZE
    lead = min(-start % page, size)
    whole = (size - lead) // page * page
    ctypes.memset(start, 0, lead)
    ctypes.memset(start + lead + whole, 0, size - lead - whole)
    if whole:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start + lead), ctypes.c_size_t(whole), MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), f"the kernel refused to take back {whole} bytes")
