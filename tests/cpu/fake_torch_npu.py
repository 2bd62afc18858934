"""A stand-in for torch_npu: the part of torch_npu 2.14 that deals with memory (torch_npu/npu/__init__.py and
torch_npu/npu/memory.py), with its names, signatures and defaults. It has no other name, so code that calls one
fails here as it would there.

Below these names lies a caching allocator with the habits of torch_npu's own: it cuts blocks from segments, keeps
freed blocks for later requests, and gives a pool's segments back after the pool has ended. A pool with an
allocator of its own takes segments through the two C functions of that allocator.
"""

import contextlib
import ctypes
import itertools
import sys
import threading
import types

import torch

BLOCK_BYTES = 512  # requests are rounded up to this
SEGMENT_BYTES = 2 << 20

Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class _CustomAllocator:
    """The allocator that `_npu_customAllocator` makes from two addresses of functions."""

    def __init__(self, alloc_fn, free_fn):
        self.malloc, self.free = Malloc(alloc_fn), Free(free_fn)


class _Segment:
    """Memory that an allocator's C function returned, cut into blocks: address -> [size, is allocated]."""

    def __init__(self, address, size, device, allocator):
        self.address, self.size, self.device, self.allocator = address, size, device, allocator
        self.blocks = {address: [size, False]}

    def take(self, size):
        for address, (room, allocated) in sorted(self.blocks.items()):
            if not allocated and room >= size:
                self.blocks[address] = [size, True]
                if room > size:
                    self.blocks[address + size] = [room - size, False]
                return address
        return None

    def release(self, address):
        self.blocks[address][1] = False
        joined = {}
        for start, (size, allocated) in sorted(self.blocks.items()):
            last = next(reversed(joined), None)
            if last is not None and not allocated and not joined[last][1]:
                joined[last][0] += size
            else:
                joined[start] = [size, allocated]
        self.blocks = joined

    def is_unused(self):
        return not any(allocated for _, allocated in self.blocks.values())


class _CachingAllocator:
    """The state that torch_npu keeps in C++: pools, their segments, and the pool that each thread allocates in."""

    def __init__(self, runtime):
        self.runtime = runtime  # the fake ACL library, as a ctypes.CDLL
        self.use_counts, self.segments = {}, {}  # by pool id
        self.thread = threading.local()

    def active_pools(self):
        """The pools that this thread allocates in, as (device, pool), in the order in which it entered them."""
        if not hasattr(self.thread, "pools"):
            self.thread.pools = []
        return self.thread.pools

    def allocate(self, size, device):
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        # The first pool entered counts, not the last: torch_npu asks its filters in that order.
        pool = next((pool for at, pool in self.active_pools() if at == device), None)
        if pool is None:
            raise NotImplementedError("the stand-in has no memory outside of pools")
        for segment in self.segments[pool.id]:
            if segment.device == device and (address := segment.take(size)) is not None:
                return address
        total = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        address = pool.allocator.malloc(total, device, None)
        if not address:
            raise torch.OutOfMemoryError(f"NPU out of memory. Tried to allocate {size / 2**20:.2f} MiB")
        self.segments[pool.id].append(_Segment(address, total, device, pool.allocator))
        return self.segments[pool.id][-1].take(size)

    def release(self, address):
        for segment in itertools.chain.from_iterable(self.segments.values()):
            if segment.blocks.get(address, (0, False))[1]:
                return segment.release(address)
        raise RuntimeError(f"invalid device pointer: {address:#x}")

    def empty_cache(self):
        """Gives unused segments back. A pool keeps its own until nobody uses the pool any more."""
        for pool_id, segments in self.segments.items():
            if not self.use_counts[pool_id]:
                for segment in [segment for segment in segments if segment.is_unused()]:
                    segments.remove(segment)
                    segment.allocator.free(segment.address, segment.size, segment.device, None)

    def reserved(self, device):
        every = itertools.chain.from_iterable(self.segments.values())
        return sum(segment.size for segment in every if segment.device == device)


def make_torch_npu(driver_path):
    """The module `torch_npu`, on the fake ACL library at `driver_path`."""
    cache = _CachingAllocator(ctypes.CDLL(driver_path))
    ids = itertools.count(1)

    class _NPUAllocator:
        def __init__(self, allocator):
            self._allocator = allocator

        def allocator(self):
            return self._allocator

    class NPUPluggableAllocator(_NPUAllocator):
        def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str):
            library = ctypes.CDLL(path_to_so_file)
            alloc_fn, free_fn = (
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                for name in (alloc_fn_name, free_fn_name)
            )
            super().__init__(_CustomAllocator(alloc_fn, free_fn))

    class MemPool:
        def __init__(self, allocator=None, use_on_oom: bool = False, no_split: bool = False):
            if not isinstance(allocator, _CustomAllocator):
                raise TypeError(f"incompatible constructor arguments: {allocator!r}")  # as pybind11 says it
            self.allocator, self._id = allocator, (0, next(ids))
            cache.use_counts[self._id], cache.segments[self._id] = 1, []

        def __del__(self):
            if hasattr(self, "_id"):
                cache.use_counts[self._id] -= 1
                cache.empty_cache()

        @property
        def id(self):
            return self._id

        def use_count(self):
            return cache.use_counts[self._id]

        def snapshot(self):
            raise AssertionError("PyTorch's frees the numbers of the pool's id")

    @contextlib.contextmanager
    def use_mem_pool(pool, device=None):
        entry = (current_device() if device is None else device_index(device), pool)
        cache.active_pools().append(entry)
        cache.use_counts[pool.id] += 1
        try:
            yield
        finally:
            cache.active_pools().remove(entry)
            cache.use_counts[pool.id] -= 1

    def memory_snapshot(mempool_id=None):
        return [
            {
                "address": segment.address,
                "total_size": segment.size,
                "device": segment.device,
                "segment_pool_id": pool_id,
                "blocks": [
                    {
                        "address": address,
                        "size": size,
                        "state": "active_allocated" if allocated else "inactive",
                    }
                    for address, (size, allocated) in segment.blocks.items()
                ],
            }
            for pool_id, segments in cache.segments.items()
            if mempool_id in (None, pool_id)
            for segment in segments
        ]

    def caching_allocator_alloc(size, device=None, stream=None):
        return cache.allocate(size, current_device() if device is None else device_index(device))

    def caching_allocator_delete(mem_ptr):
        cache.release(mem_ptr)

    def empty_cache():
        cache.empty_cache()

    def memory_reserved(device=None):
        return cache.reserved(current_device() if device is None else device_index(device))

    def current_device():
        device = ctypes.c_int32()
        if cache.runtime.aclrtGetDevice(ctypes.byref(device)):
            set_device(0)
        return max(0, device.value)

    def set_device(device):
        cache.runtime.aclrtSetDevice(device_index(device))

    def mem_get_info(device=None):
        counts = (ctypes.c_int64 * 7)()
        cache.runtime.fake_counts(counts)
        total = 1 << 32
        return total - counts[6], total

    def device_index(device):
        return device if isinstance(device, int) else torch.device(device).index

    memory = types.ModuleType("torch_npu.npu.memory")
    in_memory = (
        NPUPluggableAllocator,
        MemPool,
        use_mem_pool,
        memory_snapshot,
        caching_allocator_alloc,
        caching_allocator_delete,
        empty_cache,
        memory_reserved,
    )
    npu = types.ModuleType("torch_npu.npu")
    npu.memory = memory
    for function in in_memory:
        setattr(memory, function.__name__, function)
        setattr(npu, function.__name__, function)  # by `from .memory import *`
    for function in (current_device, set_device, mem_get_info):
        setattr(npu, function.__name__, function)
    torch_npu = types.ModuleType("torch_npu")
    torch_npu.npu = npu
    return torch_npu


def install(monkeypatch, driver_path):
    """Makes `import torch_npu` find the stand-in, and `torch.npu` its devices, until the test ends."""
    torch_npu = make_torch_npu(driver_path)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setattr(torch, "npu", torch_npu.npu, raising=False)
    return torch_npu.npu
