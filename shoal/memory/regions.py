"""Regions of device memory that can be given back and taken again while tensors in them keep their addresses.

    with region("optimizer"):
        state = torch.zeros(n, device="cuda")
    with region("scratch", offload=False):
        buffer = torch.empty(n, device="cuda")
    pause()       # their memory is free for others; the state is in host memory, the buffer's content is gone
    resume()      # the same tensors, at the same addresses

Regions work without the engine, together with PyTorch's own allocator, and in a training program too.
Captured CUDA graphs stay valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.errors import ConfigError, UnavailableError
from shoal.memory import available, host, library, pools
from shoal.memory.library import Job, Moved, Range, RegionUsage, Status
from shoal.stats import MemoryReport

logger = logging.getLogger(__name__)

Offload = bool | Literal["file"]
DEFAULT = "default"
PIECE_BYTES = (64 << 20, 512 << 20)  # the smallest and the largest piece of physical memory
MAP_THREADS = 2  # The driver works on one mapping at a time, so a second thread speeds up unmapping alone.
STREAMS = 2


@dataclass(eq=False, slots=True)
class _Region:
    tag: str
    device: int
    handle: int
    pool: Any
    offload: Offload = True
    reread: Callable[[], None] | None = None
    entered: int = 0


class Regions:
    """A set of regions, each with a tag. Sets are independent of each other, and may be used from several
    threads. A region spans the devices that were current when it was entered.

    `kind` is "cuda", or "npu" for Ascend, where this has never run on a device.
    """

    def __init__(
        self,
        kind: str = "cuda",
        *,
        piece_bytes: tuple[int, int] = PIECE_BYTES,
        chunk_bytes: int = host.CHUNK_BYTES,
        map_threads: int = MAP_THREADS,
        streams: int = STREAMS,
        torch_pools: Any = None,
        driver_path: str | None = None,
    ) -> None:
        """Raises ConfigError if there is no driver, or no C compiler to build the library that calls it."""
        self._library = library.load()
        self._driver = library.open_driver(kind == "npu", driver_path)
        self._pools = torch_pools or pools.TorchPools(kind)
        self._piece_bytes, self._chunk_bytes = piece_bytes, chunk_bytes
        self._map_threads, self._streams = map_threads, streams
        self._regions: dict[tuple[str, int], _Region] = {}
        self._host: list[host.HostBuffers] = []  # It gets its one element when that is first needed.
        # It ends a set that nobody closed before the last reference to it went.
        self._finalizer = weakref.finalize(self, _end, self._regions, self._host, self._library)
        self._finalizer.atexit = False  # The end of the process frees everything, and faster.
        self._lock = threading.RLock()
        self._local = threading.local()  # the regions this thread is in

    @contextlib.contextmanager
    def region(
        self, tag: str = DEFAULT, offload: Offload | None = None, reread: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Puts tensors into the region: those that this thread makes inside of this context on the device
        that is current at entry. The innermost region counts.

        `offload` says what a pause does with their content: True keeps it in host memory, False drops it, and
        "file" drops it and lets `reread` bring it back at resume. None: nothing changes. The content of a new
        region is kept, as vLLM's allocator keeps memory without a tag.

        Raises UnavailableError while the region is paused, and PyTorch's OutOfMemoryError, with a note, if
        there is no memory.
        """
        if offload == "file" and reread is None:
            raise ConfigError(f"region {tag!r}: offload='file' needs `reread`, which brings the content back")
        with self._lock:
            region = self._find(tag, self._pools.current_device())
            if self._is_paused(region):
                raise UnavailableError(
                    f"region {tag!r} is paused, so nothing can be allocated in it; resume it first"
                )
            if offload is not None:
                region.offload, region.reread = offload, reread
            region.entered += 1
        stack = self._stack()
        if stack:
            stack[-1][1].__exit__(None, None, None)  # PyTorch would continue to use the outer pool.
        self._enter(stack, region)
        try:
            yield
        except torch.OutOfMemoryError as error:
            status = Status()
            self._library.shoal_region_failure(region.handle, status)
            if status.kind:
                error.add_note(f"memory region {tag!r}: {status.text.decode(errors='replace')}")
            raise
        finally:
            _, pool = stack.pop()
            pool.__exit__(None, None, None)
            if stack:
                outer, _ = stack.pop()
                self._enter(stack, outer)
            with self._lock:
                region.entered -= 1

    def graph_pool(self, tag: str) -> tuple[int, int]:
        """Returns the pool's id for torch.cuda.graph(graph, pool=...). The graph's memory is then in the
        region, too."""
        with self._lock:
            return self._pools.pool_id(self._find(tag, self._pools.current_device()).pool)

    def pause(self, tags: Sequence[str] | None = None, keep: Sequence[str] | None = None) -> MemoryReport:
        """Gives back the memory of the regions of these tags, or of all regions. Either all of them are
        paused or none is.

        `keep` names the tags whose content goes to host memory; without it each region's own `offload`
        decides. A region that is paused already stays paused. If `keep` does not name it, its kept content is
        dropped and its host buffers are given back.

        Raises ConfigError for unknown tags, UnavailableError if a thread is inside one of the regions, and
        MemoryError if host memory is short. In these cases nothing has been given back.
        """
        start = time.perf_counter()
        with self._lock:
            chosen = self._choose(tags)
            going = [region for region in chosen if not self._is_paused(region)]
            if keep is None:
                kept = [region for region in chosen if region not in going or region.offload is True]
            else:
                kept = [region for region in chosen if region.tag in keep]
            for region in going:
                if region.entered:
                    raise UnavailableError(
                        f"region {region.tag!r} is being allocated in; leave it before it is paused"
                    )
            ranges = {id(region): self._pools.live_ranges(region.pool) for region in going if region in kept}
            self._check_host([region for region in going if region in kept], ranges)
            dropped = any(
                region not in going and region not in kept and self._usage(region).host for region in chosen
            )
            moved = self._call(
                "shoal_pause", [(region, region in kept, ranges.get(id(region))) for region in chosen]
            )
            if dropped:  # The caller wants the host's memory.
                self._buffers().trim()
            self._pools.release_cache()
            for buffers in self._host:
                buffers.warn_of_plain()
            return self._report(start, moved)

    def resume(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Takes memory again for the paused regions of these tags, or for all. Kept content is there again;
        other content is undefined. Raises torch.OutOfMemoryError, and any error of `reread`. After an error
        all regions are paused as before, nothing is lost, and the call can be repeated."""
        start = time.perf_counter()
        with self._lock:
            coming = [region for region in self._choose(tags) if self._is_paused(region)]
            kept = [region for region in coming if self._usage(region).host]
            moved = self._call("shoal_resume", [(region, False, None) for region in coming])
            rereads = dict.fromkeys(
                region.reread
                for region in coming
                if region.offload == "file" and region.reread and region not in kept
            )
            try:
                for reread in rereads:
                    reread()
            except BaseException:
                self.pause([region.tag for region in coming], [region.tag for region in kept])
                raise
            return self._report(start, moved)

    def usage(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of each tag: "device_bytes" are mapped now, "reserved_bytes" are allocated and
        mapped while the region is awake, and "host_bytes" are kept on the host."""
        found: dict[str, dict[str, int]] = {}
        with self._lock:
            for region in self._regions.values():
                entry = found.setdefault(
                    region.tag, {"device_bytes": 0, "reserved_bytes": 0, "host_bytes": 0}
                )
                usage = self._usage(region)
                for name, value in zip(entry, (usage.mapped, usage.allocated, usage.host)):
                    entry[name] += value
        return found

    def in_use(self) -> dict[str, int]:
        """Returns how many bytes of the devices' memory are taken: "in_use_bytes" by any process,
        "region_bytes" by this set, and "process_bytes" by the other memory that PyTorch holds in this
        process. The rest belongs to contexts and to other processes."""
        with self._lock:
            in_use = process = 0
            for device in {region.device for region in self._regions.values()}:
                used, reserved = self._pools.device_usage(device)
                ours = RegionUsage()
                self._library.shoal_process_usage(self._driver, device, ours)
                in_use += used
                process += reserved - ours.allocated + ours.mapped
            regions = sum(self._usage(region).mapped for region in self._regions.values())
            elsewhere = max(0, process - regions)
            return {"in_use_bytes": in_use, "region_bytes": regions, "process_bytes": elsewhere}

    def paused(self) -> set[str]:
        """Returns the tags of the regions that are paused."""
        with self._lock:
            return {region.tag for region in self._regions.values() if self._is_paused(region)}

    def prepare_host(self, *, wait: bool = False) -> None:
        """Has host memory pinned in the background, so that no pause waits for it: as many bytes as the
        regions with offload=True hold. Raises MemoryError if the system has fewer."""
        with self._lock:
            num_bytes = sum(
                self._usage(region).allocated for region in self._regions.values() if region.offload is True
            )
            if not num_bytes:
                return
            buffers = self._buffers()
            if (missing := buffers.missing(num_bytes)) > (free := available.available_bytes()):
                raise MemoryError(
                    f"{missing} bytes of host memory are needed to keep {num_bytes} bytes, {free} are free"
                )
            buffers.prepare(num_bytes)
        if wait:
            buffers.wait()

    def host_usage(self) -> dict[str, int]:
        """Returns the bytes of the host buffers by state, as HostBuffers.usage does."""
        with self._lock:
            return self._buffers().usage()

    def close(self) -> None:
        """Ends the regions. Memory that tensors still hold is freed when they are. Host buffers are freed at
        once, with the content that they keep."""
        with self._lock:
            _end(self._regions, self._host, self._library)

    def _find(self, tag: str, device: int) -> _Region:
        found = self._regions.get((tag, device))
        if found is None:
            status = Status()
            handle = self._library.shoal_region_open(self._driver, device, 0, *self._piece_bytes, status)
            if not handle:
                raise library.error_of(status)
            try:
                pool = self._pools.open(self._library._name, self._library.shoal_region_slot(handle))
            except BaseException:
                self._library.shoal_region_close(handle)
                raise
            found = self._regions[tag, device] = _Region(tag, device, handle, pool)
        return found

    def _stack(self) -> list[tuple[_Region, Any]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def _enter(self, stack: list[tuple[_Region, Any]], region: _Region) -> None:
        pool = self._pools.use(region.pool, region.device)
        pool.__enter__()
        stack.append((region, pool))

    def _choose(self, tags: Sequence[str] | None) -> list[_Region]:
        known = {tag for tag, _ in self._regions}
        unknown = [] if tags is None else sorted(set(tags) - known)
        if isinstance(tags, str):
            wrong = "must be a list"
        elif unknown:
            wrong = f"no region is called {unknown[0]!r}"
        else:
            wrong = None
        if wrong:
            there = f"there are {', '.join(sorted(known))}" if known else "no region exists yet"
            raise ConfigError(f"tags {tags!r:.80}: {wrong}; {there}", field="tags")
        return [region for region in self._regions.values() if tags is None or region.tag in tags]

    def _check_host(self, kept: list[_Region], ranges: dict[int, list[tuple[int, int]] | None]) -> None:
        needed = 0
        for region in kept:
            live = ranges[id(region)]
            size = self._usage(region).allocated if live is None else sum(size for _, size in live)
            needed += -(-size // self._chunk_bytes) * self._chunk_bytes
        if needed and (missing := self._buffers().missing(needed)) > (free := available.available_bytes()):
            names = ", ".join(region.tag for region in kept)
            raise MemoryError(f"{missing} bytes of host memory are needed to keep {names}, {free} are free")

    def _call(self, name: str, regions: list[tuple[_Region, bool, list[tuple[int, int]] | None]]) -> Moved:
        jobs, moved, status, arrays = (Job * len(regions))(), Moved(), Status(), []
        for job, (region, keep, ranges) in zip(jobs, regions):
            array = (Range * len(ranges or ()))(*(Range(*pair) for pair in ranges or ()))
            arrays.append(array)
            job.region, job.keep, job.ranges = region.handle, keep, array
            job.num_ranges = -1 if ranges is None else len(ranges)
        buffers = (self._buffers().handle,) if name == "shoal_pause" else ()
        if getattr(self._library, name)(
            jobs, len(jobs), *buffers, self._map_threads, self._streams, moved, status
        ):
            raise library.error_of(status)
        logger.debug(
            "%s: copies queued after %.3f s, pieces done %.3f s, all %.3f s",
            name,
            moved.queued,
            moved.pieces,
            moved.end,
        )
        return moved

    def _is_paused(self, region: _Region) -> bool:
        """Asks the library, as an interrupt may come between its work and a note kept here."""
        return bool(self._usage(region).paused)

    def _usage(self, region: _Region) -> RegionUsage:
        usage = RegionUsage()
        self._library.shoal_region_usage(region.handle, usage)
        return usage

    def _buffers(self) -> host.HostBuffers:
        if not self._host:
            device = (
                next(iter(self._regions.values())).device if self._regions else self._pools.current_device()
            )
            self._host.append(host.HostBuffers(self._driver, device, self._chunk_bytes))
        return self._host[0]

    def _report(self, start: float, moved: Moved) -> MemoryReport:
        host_bytes = sum(entry["host_bytes"] for entry in self.usage().values())
        seconds = time.perf_counter() - start
        return MemoryReport(seconds, moved.freed, moved.taken, host_bytes, **self.in_use())


def _end(regions: dict[tuple[str, int], _Region], buffers: list[host.HostBuffers], own: ctypes.CDLL) -> None:
    """Closes the regions, then the buffers, which hold the content that the regions keep."""
    for region in regions.values():
        region.pool = None
        if left := own.shoal_region_close(region.handle):
            logger.debug("region %r: tensors still hold %d bytes", region.tag, left)
    regions.clear()
    while buffers:
        buffers.pop().close()


@functools.cache
def default() -> Regions:
    """Returns the set of regions that the functions below work on."""
    return Regions()


def region(
    tag: str = DEFAULT, offload: Offload | None = None, reread: Callable[[], None] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Regions.region of the default set: puts tensors that are made inside into the region `tag`."""
    return default().region(tag, offload, reread)


def pause(tags: Sequence[str] | None = None, keep: Sequence[str] | None = None) -> MemoryReport:
    """Regions.pause of the default set: gives back the memory of regions."""
    return default().pause(tags, keep)


def resume(tags: Sequence[str] | None = None) -> MemoryReport:
    """Regions.resume of the default set: takes the memory of regions again."""
    return default().resume(tags)


def usage() -> dict[str, dict[str, int]]:
    """Regions.usage of the default set: the bytes of each tag."""
    return default().usage()
