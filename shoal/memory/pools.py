"""PyTorch's side of a region: a memory pool whose segments the region provides.

It works for CUDA, and for Ascend through torch_npu.
"""

from __future__ import annotations

import functools
import importlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from shoal.errors import ConfigError

MERGE_BYTES = 64 << 10  # A smaller gap of dead bytes is copied along, which is cheaper than another copy.


class TorchPools:
    """The calls of PyTorch that regions need, on devices of one kind: "cuda" or "npu"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "npu":
            importlib.import_module("torch_npu")
        self.device = getattr(torch, kind)
        self._memory = self.device.memory
        self._allocator = (
            self._memory.CUDAPluggableAllocator if kind == "cuda" else self._memory.NPUPluggableAllocator
        )

    def current_device(self) -> int:
        return self.device.current_device()

    def open(self, library: str, slot: int) -> Any:
        """Returns a pool that takes its segments from the region in `slot` of our C library, whose path is
        `library`. Raises ConfigError if PyTorch is set to expandable_segments, because it then gets its
        memory past every pool."""
        for name in (
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_NPU_ALLOC_CONF",
            "PYTORCH_HIP_ALLOC_CONF",
        ):
            if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
                raise ConfigError(
                    f"{name}={os.environ[name]!r}: memory that can be given back does not work with "
                    "expandable_segments; set it to False or leave it out"
                )
        return self._memory.MemPool(_allocator(self._allocator, library, slot)._allocator)

    def use(self, pool: Any, device: int) -> AbstractContextManager[None]:
        return self._memory.use_mem_pool(pool, device)

    def pool_id(self, pool: Any) -> tuple[int, int]:
        return pool.id

    def live_ranges(self, pool: Any) -> list[tuple[int, int]] | None:
        """Returns address and size of the memory that tensors hold, in order of address. The rest of the pool
        is freed blocks, which PyTorch caches and which need not be kept. None: this PyTorch cannot say, so
        everything must be kept."""
        if not hasattr(pool, "snapshot"):
            return None
        # pool.snapshot() passes the pool's id to a C function that releases its numbers once too often (in
        # PyTorch 2.11). Python frees numbers above 256, so a process with more pools would end in a fault.
        own = pool.id
        live = sorted(
            (block["address"], block["size"])
            for segment in self._memory.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == own
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        return merged(live)

    def device_usage(self, device: int) -> tuple[int, int]:
        """Returns how many bytes of the device are in use, by any process, and how many PyTorch has reserved
        in this process, paused regions included."""
        free, total = self.device.mem_get_info(device)
        return total - free, self.device.memory_reserved(device)

    def release_cache(self) -> None:
        """Gives the memory that PyTorch caches outside of regions back to the device."""
        self.device.empty_cache()


@functools.cache
def _allocator(kind: type, library: str, slot: int) -> Any:
    """Returns PyTorch's allocator for a slot. The cache keeps it alive for good: PyTorch frees memory through
    it as long as a tensor lives, and neither the pool nor the tensor holds a reference to it."""
    return kind(library, f"shoal_malloc_{slot:02o}", "shoal_free")


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins ranges (address, size), sorted by address, whose gaps are below MERGE_BYTES."""
    found: list[tuple[int, int]] = []
    for address, size in ranges:
        if found and address - sum(found[-1]) < MERGE_BYTES:
            found[-1] = (found[-1][0], address + size - found[-1][0])
        else:
            found.append((address, size))
    return found
