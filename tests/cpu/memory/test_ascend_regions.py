"""Regions on Ascend from end to end: our C library on a fake ACL driver, below the fake of torch_npu.
Nothing else is replaced."""

import ctypes
import gc
import inspect

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.memory.pools import TorchPools
from shoal.memory.regions import Regions
from tests.cpu import fake_torch_npu
from tests.cpu.fake_memory import GRAIN, checked_fake, needs_compiler

pytestmark = needs_compiler
MIB = 1 << 20


@pytest.fixture
def fake():
    with checked_fake() as found:
        yield found


@pytest.fixture
def npu(fake, monkeypatch):
    """The fake of `torch.npu`, on device 0."""
    found = fake_torch_npu.install(monkeypatch, fake.path)
    found.set_device(0)
    return found


@pytest.fixture
def regions(fake, npu):
    made = Regions("npu", driver_path=fake.path, piece_bytes=(2 * GRAIN, 8 * GRAIN), chunk_bytes=3 * GRAIN)
    yield made
    made.close()


class Tensor:
    """Memory that torch_npu allocated where the caller is, filled with numbers of a seed."""

    def __init__(self, npu, size, seed=0, **options):
        self.npu, self.size = npu, size
        self.address = npu.caching_allocator_alloc(size, **options)
        self.content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        self.bytes()[:] = self.content

    def bytes(self):
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))

    def is_intact(self):
        return np.array_equal(self.bytes(), self.content)

    def free(self):
        self.npu.caching_allocator_delete(self.address)
        self.npu.empty_cache()


def test_kept_content_comes_back_at_the_same_address_and_dropped_memory_is_free_meanwhile(regions, fake, npu):
    with regions.region("weights", offload=True):
        weights = [Tensor(npu, size, seed=size) for size in (700, 3 * MIB, 5 * GRAIN + 512)]
    with regions.region("cache", offload=False):
        cache = Tensor(npu, 4 * MIB)
    mapped = fake.counts()["bytes"]
    for _ in range(2):
        report = regions.pause()
        assert report.freed_bytes == mapped and fake.counts()["bytes"] == 0
        assert regions.resume().taken_bytes == mapped
        assert all(tensor.is_intact() for tensor in weights)
    cache.bytes()[:] = 1
    for tensor in (*weights, cache):
        tensor.free()


def test_what_torch_npu_has_cached_is_not_copied(regions, npu):
    with regions.region("weights", offload=True):
        freed, kept = Tensor(npu, 4 * MIB), Tensor(npu, 6 * MIB, seed=1)
    npu.caching_allocator_delete(freed.address)
    assert regions.pause().host_bytes == 6 * MIB
    regions.resume()
    assert kept.is_intact()
    kept.free()


def test_a_torch_npu_whose_pools_have_no_snapshot_keeps_every_byte(regions, npu, monkeypatch):
    """Versions before `MemPool.snapshot` have no such call."""
    monkeypatch.delattr(npu.MemPool, "snapshot")
    with regions.region("weights", offload=True):
        freed, kept = Tensor(npu, 4 * MIB), Tensor(npu, 6 * MIB, seed=1)
    npu.caching_allocator_delete(freed.address)
    assert regions.pause().host_bytes == 10 * MIB
    regions.resume()
    assert kept.is_intact()
    kept.free()


def test_the_innermost_region_counts_and_the_outer_one_after_it(regions, npu):
    with regions.region("outer"):
        tensors = [Tensor(npu, 2 * MIB)]
        with regions.region("inner"):
            tensors.append(Tensor(npu, 4 * MIB))
        tensors.append(Tensor(npu, 6 * MIB))
    reserved = {tag: usage["reserved_bytes"] for tag, usage in regions.usage().items()}
    assert reserved == {"outer": 8 * MIB, "inner": 4 * MIB}
    for tensor in tensors:
        tensor.free()


def test_a_region_takes_the_device_that_is_current(regions, npu):
    tensors = []
    for device in (1, 0):
        npu.set_device(device)
        with regions.region("weights", offload=True):
            tensors.append(Tensor(npu, 2 * MIB, seed=device))
    assert (npu.memory_reserved(0), npu.memory_reserved(1)) == (2 * MIB, 2 * MIB)
    regions.pause()
    regions.resume()
    assert all(tensor.is_intact() for tensor in tensors) and npu.current_device() == 0
    for tensor in tensors:
        tensor.free()


def test_memory_that_runs_out_is_torch_npus_error_with_the_drivers_reason(regions, fake, npu):
    fake.set("capacity", 3 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory") as error, regions.region("big"):
        Tensor(npu, 4 * MIB)
    assert "no physical memory" in error.value.__notes__[0] and "'big'" in error.value.__notes__[0]
    with regions.region("big"):
        Tensor(npu, 2 * MIB).free()
    del error
    gc.collect()  # the error's traceback kept the pool alive


def test_memory_in_use_is_computed_from_torch_npu(regions, npu):
    with regions.region("a", offload=False):
        tensor = Tensor(npu, 6 * MIB)
    assert regions.in_use() == {"in_use_bytes": 6 * MIB, "region_bytes": 6 * MIB, "process_bytes": 0}
    regions.pause()
    assert regions.in_use() == {"in_use_bytes": 0, "region_bytes": 0, "process_bytes": 0}
    regions.resume()
    tensor.free()


def test_a_graph_allocates_in_the_region_by_the_id_of_its_pool(regions, npu):
    with regions.region("graphs"):
        tensor = Tensor(npu, 2 * MIB)
    (segment,) = npu.memory_snapshot(regions.graph_pool("graphs"))
    assert segment["address"] <= tensor.address < segment["address"] + segment["total_size"]
    tensor.free()


def test_a_tensor_that_outlives_its_regions_is_freed_through_the_same_library(fake, npu):
    regions = Regions("npu", driver_path=fake.path)
    with regions.region("weights"):
        tensor = Tensor(npu, 2 * MIB, seed=1)
    regions.close()
    assert tensor.is_intact() and fake.counts()["bytes"] > 0
    tensor.free()
    assert fake.counts()["bytes"] == 0


def test_expandable_segments_of_torch_npu_are_refused(npu, monkeypatch):
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match=r"PYTORCH_NPU_ALLOC_CONF.*expandable_segments"):
        TorchPools("npu").open("library.so", 0)


# Copied from torch_npu 2.14: torch_npu/npu/memory.py, and torch_npu/npu/__init__.py for the last three.
TORCH_NPU_SIGNATURES = {
    "memory.NPUPluggableAllocator": "(path_to_so_file: str, alloc_fn_name: str, free_fn_name: str)",
    "memory.MemPool": "(allocator=None, use_on_oom: bool = False, no_split: bool = False)",
    "memory.use_mem_pool": "(pool, device=None)",
    "memory.memory_snapshot": "(mempool_id=None)",
    "memory.memory_reserved": "(device=None)",
    "memory.empty_cache": "()",
    "memory.caching_allocator_alloc": "(size, device=None, stream=None)",
    "memory.caching_allocator_delete": "(mem_ptr)",
    "mem_get_info": "(device=None)",
    "current_device": "()",
    "set_device": "(device)",
}


def test_the_stand_in_has_the_names_and_signatures_of_torch_npu_and_no_others(npu):
    found = {f"memory.{name}": value for name, value in vars(npu.memory).items() if not name.startswith("__")}
    found |= {
        name: value
        for name, value in vars(npu).items()
        if not name.startswith("__") and name != "memory" and f"memory.{name}" not in found
    }
    assert {name: str(inspect.signature(value)) for name, value in found.items()} == TORCH_NPU_SIGNATURES
