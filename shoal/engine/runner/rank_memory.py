"""`RankMemory`: one rank's memory of weights and KV cache, released for sleep and taken again at the same
addresses. engine/lifecycle/sleep.py commands it.

There are two regions, named by the tags "weights" and "kv_cache". On a GPU they are regions of shoal/memory,
and the memory of the graphs of steps is with the cache. On the CPU they are ordinary memory, whose pages
are dropped: tests and laptops use sleep mode without a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shoal.config import ResolvedConfig
from shoal.engine.drafting.rank_head import RankHead
from shoal.engine.runner.state_rows import StateRows
from shoal.engine.runner.whole_rows import WholeRowSampler
from shoal.errors import ConfigError, UnavailableError
from shoal.memory.regions import Regions as VirtualRegions
from shoal.memory.thread_stacks import STACKS
from shoal.stats import MemoryReport

logger = logging.getLogger(__name__)

MADV_DONTNEED = 4


class RankMemory:
    """One rank's part in sleep, which engine/lifecycle/sleep.py commands."""

    def __init__(
        self,
        regions: Regions,
        whole_rows: WholeRowSampler,
        states: StateRows,
        device: torch.device,
        head: RankHead | None = None,
    ) -> None:
        self.regions, self.whole_rows, self.states, self.device = regions, whole_rows, states, device
        self.head = head
        self._head_is_lost = False

    def release(self, tags: Sequence[str], kept: Sequence[str]) -> dict[str, int]:
        """Gives back the memory of `tags`, after copying the memory of the tags in `kept` to the host. A tag
        that is asleep already stays so, and its copy on the host is dropped if `kept` does not name it.
        Returns figures in bytes. Raises UnavailableError, with nothing changed, if there is no host memory to
        copy to."""
        with not_now():
            report = self.regions.release(list(tags), list(kept))
        self._head_is_lost |= "weights" in tags and "weights" not in kept
        if "kv_cache" in tags:
            self.whole_rows.forget()  # every sequence has released its row
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the activations of the largest step
            if self.regions.is_asleep():
                STACKS.release()
        return report | self.regions.in_use()

    def take(self, tags: Sequence[str]) -> dict[str, int]:
        """Takes the memory of `tags` again, at the same addresses, with the content that was kept. Returns
        figures in bytes. Raises UnavailableError, with nothing changed, if there is not enough memory."""
        with not_now():
            STACKS.take()
            report = self.regions.take(list(tags))
        if self.head is not None and "weights" in tags and self._head_is_lost:
            self.head.load()  # an update may bring the target's weights alone
            self._head_is_lost = False
        if "kv_cache" in tags:
            self.whole_rows.memory_is_new()
            self.states.memory_is_new()
        return report

    def wait_for_host(self) -> float:
        """Returns when the host memory for a sleep at level 1 is ready: the seconds since its preparation
        began."""
        return self.regions.wait_for_host()

    def usage(self) -> dict[str, dict[str, int]]:
        """Bytes by tag and kind."""
        return self.regions.usage()


@contextmanager
def not_now() -> Iterator[None]:
    """Turns a lack of memory into UnavailableError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UnavailableError(f"{error}; nothing has changed, try again when there is more") from error


class CpuRegions:
    """Tensors in ordinary memory, by tag. When they are released, their pages go back to the kernel, and read
    as zeros from then on. What is kept stays where it is. Without sleep mode this only counts bytes."""

    def __init__(self) -> None:
        self._tensors: dict[str, Callable[[], Iterable[torch.Tensor]]] = {}
        self._asleep: dict[str, bool] = {}  # tag -> whether its content is kept

    def holding(self, tag: str) -> AbstractContextManager[None]:
        """Tensors that are made in this context are allocated in the region."""
        return nullcontext()

    def adopt(self, tag: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Says which tensors a region consists of."""
        self._tensors[tag] = tensors

    def release(self, tags: list[str], kept: list[str]) -> dict[str, int]:
        freed = 0
        for tag in tags:
            has_content = self._asleep.get(tag, True)
            # First, because an interrupt may arrive while pages are dropped, and the content must count as
            # lost then, too.
            self._asleep[tag] = has_content and tag in kept
            if has_content and tag not in kept:
                for tensor in self._tensors[tag]():
                    drop_pages(tensor)
                freed += self._size(tag)
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
        """Bytes of device memory in use: in total, in regions, by PyTorch outside of regions. Here regions
        alone are counted."""
        mapped = sum(entry["device_bytes"] for entry in self.usage().values())
        return {"in_use_bytes": mapped, "region_bytes": mapped, "process_bytes": 0}

    def is_asleep(self) -> bool:
        """Returns True if all memory is given back."""
        return all(tag in self._asleep for tag in self._tensors)

    def graph_pool(self, tag: str) -> tuple[int, int] | None:
        """The memory pool for a graph's own memory. None: the default one."""
        return None

    def prepare_host(self) -> None:
        """Starts to make ready, in the background, what a sleep needs on the host."""

    def wait_for_host(self) -> float:
        """Returns when that is ready: the seconds since it began."""
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
    """Has the methods of CpuRegions, for a GPU with sleep mode. Memory of a region that sleeps is unmapped,
    and its addresses stay reserved."""

    def __init__(self) -> None:
        self._regions = VirtualRegions("cuda")
        self._began = 0.0

    def holding(self, tag: str) -> AbstractContextManager[None]:
        return self._regions.region(tag, offload=tag == "weights")

    def adopt(self, tag: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Does nothing, because a GPU region knows its content."""

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

    def is_asleep(self) -> bool:
        return self._regions.paused() == self._regions.usage().keys()

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


Regions = CpuRegions | GpuRegions


def new_regions(device: torch.device, enable_sleep_mode: bool) -> Regions:
    """Made before the model and the cache, which are allocated in them. They may be made alongside a sleeping
    engine."""
    STACKS.take()
    return GpuRegions() if device.type == "cuda" and enable_sleep_mode else CpuRegions()


def _figures(report: MemoryReport) -> dict[str, int]:
    figures = dataclasses.asdict(report)
    del figures["seconds"]
    return figures


def drop_pages(tensor: torch.Tensor) -> None:
    """Gives the whole pages of a CPU tensor's memory back to the kernel. All of the tensor reads as zeros
    then. Raises OSError."""
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


class GpuShare:
    """`total * gpu_memory_utilization` bytes of a GPU. As in vLLM, what other processes use does not count
    against it, but a share larger than what is free at the start is refused with ConfigError. It must be made
    before anything is allocated on the device. An engine with a given cache size has no share."""

    def __init__(self, device: torch.device, config: ResolvedConfig) -> None:
        self.device = device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.torch_at_start = torch.cuda.memory_allocated(device)
        self.free_at_start, total = torch.cuda.mem_get_info(device)
        self.reserved_at_start = torch.cuda.memory_reserved(device)
        self.num_bytes = int(total * config.gpu_memory_utilization)
        if self.num_bytes > self.free_at_start:
            asked, free, whole = (size / 2**30 for size in (self.num_bytes, self.free_at_start, total))
            raise ConfigError(
                f"gpu_memory_utilization {config.gpu_memory_utilization} asks for {asked:.1f} GiB of "
                f"{device}, but only {free:.1f} of {whole:.1f} GiB are free; lower it, set "
                "kv_cache_memory_bytes or end what else runs there"
            )

    def room(self, graph_bytes: int) -> int:
        """Bytes left for the KV cache: the share less torch's peak so far, what others took since the start
        (NCCL, kernels), and `graph_bytes`."""
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.torch_at_start
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        in_torch = torch.cuda.memory_reserved(self.device) - self.reserved_at_start
        beside_torch = max(0, self.free_at_start - free - in_torch)
        return self.num_bytes - peak - beside_torch - graph_bytes
