"""The block library with a real device: every pair of storages, by copy engines and by the kernel, on
streams; lifetimes."""

import gc
import itertools
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from shoal.kv import block_map, copy
from shoal.kv import storage as storage_module
from shoal.kv.block_map import BlockCopyError, BlockMap
from shoal.kv.copy import CopyStream, copy_blocks
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.library.borrowed import borrowed_memory
from shoal.kv.library.copies import CopyStreams, copy_layer
from shoal.kv.library.files import DirectFile, mapped_file
from shoal.kv.library.tensor_view import TensorView, blocks_of, layer_of
from shoal.kv.storage import (
    Kind,
    StorageError,
    StorageInUseError,
    device_memory,
    host_memory,
    memory_of,
    pinned_memory,
)
from shoal.kv.view import BlockView
from shoal.memory import slab
from tests import kv_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")
SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 4, 4, 64, "bfloat16", 16)
SOME_MS = 100_000_000  # cycles


@pytest.fixture(params=["engines", "kernel"])
def way(request, monkeypatch):
    monkeypatch.setattr(block_map, "DMA_BYTES", 1 if request.param == "engines" else 1 << 60)
    return request.param


def cache_of(spec, num_blocks, allocate):
    return kv_cases.new_cache(spec, num_blocks, allocate, random.Random(num_blocks))


def test_random_copies_between_all_kinds(way, tmp_path, monkeypatch):
    count = itertools.count()
    kinds = [
        device_memory,
        pinned_memory,
        host_memory,
        lambda n: mapped_file(tmp_path / str(next(count)), n),
        lambda n: DirectFile(tmp_path / str(next(count)), n),
    ]
    monkeypatch.setattr(copy, "STAGING_BYTES", 20_000)
    kv_cases.check_random_copies(
        seed=31, rounds=50, allocators=list(itertools.product(kinds, kinds)), new_spec=kv_cases.few_specs
    )


@pytest.mark.parametrize("layout", Layout)
def test_ids_are_honoured(layout, way):
    for pair in itertools.product((device_memory, pinned_memory), repeat=2):
        kv_cases.check_ids_are_honoured(layout, *pair)


@pytest.mark.parametrize("layouts", list(itertools.product(Layout, Layout)), ids=lambda pair: " ".join(pair))
def test_round_trips_layer_by_layer(layouts, way):
    kv_cases.check_a_round_trip_layer_by_layer("cuda", pinned_memory, device_memory, layouts)


def test_between_tensor_parallel_sizes(way):
    kv_cases.check_the_permutation(device_memory)
    kinds = (device_memory, pinned_memory)
    kv_cases.check_random_shards(
        seed=32, rounds=24, allocators=list(itertools.product(kinds, kinds)), new_spec=kv_cases.few_specs
    )


def as_blocks(rows):
    """The rows of a uint8 tensor as blocks."""
    spec = CacheSpec(Layout.WHOLE_BLOCKS, 1, 1, rows.shape[1] // 2, "uint8", 1, num_blocks=len(rows))
    return BlockView.over(spec, memory_of(rows))


def test_an_engines_cache_to_a_slab_and_back(way):
    kv = torch.randn(40, 4, 2, 4, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    spec = replace(SPEC, num_blocks=40)
    inside = blocks_of(spec, kv)
    outside = BlockView.over(replace(spec, num_blocks=50), pinned_memory(50 * spec.block_bytes))
    there, back = BlockMap(inside, outside), BlockMap(outside, inside)
    rng = random.Random(5)
    copying = CopyStream(DEVICE)
    for _ in range(3):
        blocks, slots = rng.sample(range(40), 30), rng.sample(range(50), 30)
        before = kv.clone()
        copying.stream.wait_stream(torch.cuda.current_stream())
        out = copying.stage(there, blocks, slots).trigger_all_layers()
        torch.cuda.current_stream().wait_event(out)
        kv.zero_()
        copying.stream.wait_stream(torch.cuda.current_stream())
        copying.stage(back, slots, blocks).trigger_all_layers().synchronize()
        assert torch.equal(kv[blocks], before[blocks])
        left = [i for i in range(40) if i not in blocks]
        assert not kv[left].any()
        kv.copy_(before)
    copying.stage(there, [], []).trigger_all_layers().synchronize()


@pytest.mark.parametrize("default", [True, False])
def test_a_copy_without_a_stream_or_on_a_default_one_is_in_order_with_it(way, default):
    kv = torch.full((8, 1 << 20), 1, device=DEVICE, dtype=torch.uint8)
    slab = pinned_memory(8 << 20).tensor().view(8, -1)
    stream = torch.cuda.default_stream() if default else None
    torch.cuda._sleep(SOME_MS)
    kv.fill_(2)
    copy_blocks(as_blocks(kv), range(8), as_blocks(slab), range(8), stream)
    kv.fill_(3)
    torch.cuda.synchronize()
    assert (slab == 2).all()


def test_one_layer_is_copied_behind_the_current_stream_when_the_call_returns(way):
    host, device = cache_of(SPEC, 4, pinned_memory), cache_of(SPEC, 4, device_memory)
    expected = kv_cases.contents(host)
    block_map = BlockMap(device, host)
    torch.cuda._sleep(SOME_MS)
    layer_of(device, 2, mutable=True).tensor().fill_(5)
    copy_layer(block_map, 2, [0, 1], [3, 2])
    expected[2, [3, 2]] = kv_cases.contents(device)[2, [0, 1]]
    assert torch.equal(kv_cases.contents(host), expected)


def test_a_thread_that_never_used_the_device(way):
    kv = torch.full((4, 1 << 20), 7, device=DEVICE, dtype=torch.uint8)
    slab = pinned_memory(4 << 20).tensor().view(4, -1)
    block_map, copying = BlockMap(as_blocks(kv), as_blocks(slab)), CopyStream(DEVICE)
    copying.stream.wait_stream(torch.cuda.current_stream())
    thread = threading.Thread(
        target=lambda: copying.stage(block_map, [3, 1], [0, 2]).trigger_all_layers().synchronize()
    )
    thread.start()
    thread.join()
    assert slab[:, 0].tolist() == [7, 0, 7, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_between_two_gpus(way):
    def first(num_bytes):
        return device_memory(num_bytes, "cuda:0")

    def second(num_bytes):
        return device_memory(num_bytes, "cuda:1")

    for pair in ((first, second), (second, first)):
        kv_cases.check_random_copies(seed=41, rounds=10, allocators=[pair], new_spec=kv_cases.few_specs)
        kv_cases.check_random_shards(seed=42, rounds=10, allocators=[pair], new_spec=kv_cases.few_specs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_that_do_not_reach_each_other_copy_by_way_of_pinned_memory(monkeypatch):
    caches = [cache_of(SPEC, 4, lambda n, i=i: device_memory(n, f"cuda:{i}")) for i in range(2)]
    monkeypatch.setattr(block_map, "_become_peers", lambda device, other: False)
    copy_blocks(caches[0], [3, 1], caches[1], [0, 2])
    assert torch.equal(kv_cases.contents(caches[1])[:, [0, 2]], kv_cases.contents(caches[0])[:, [3, 1]])
    with pytest.raises(BlockCopyError, match="no processor reaches"):
        BlockMap(*caches)


def test_a_stream_waits_for_a_layer_and_a_layer_for_a_stream():
    host, device = (
        cache_of(replace(SPEC, layout=Layout.BLOCK_FIRST), 4, allocate)
        for allocate in (pinned_memory, device_memory)
    )
    compute, copying = torch.cuda.Stream(), CopyStream(DEVICE)
    staged = copying.stage(BlockMap(device, host), range(4), range(4))
    with torch.cuda.stream(compute):
        torch.cuda._sleep(SOME_MS)
        layer_of(device, 2, mutable=True).tensor().fill_(5)
        computed = compute.record_event()
    staged.trigger_layer(2, after=computed)
    staged.wait_layer(2, compute)
    with torch.cuda.stream(compute):
        layer_of(device, 2, mutable=True).tensor().fill_(6)
    staged.event(2).synchronize()
    assert (kv_cases.on_host(layer_of(host, 2)) == 5).all()
    torch.cuda.synchronize()


def test_staged_copies_within_a_cache_and_bad_kinds():
    device = cache_of(SPEC, 6, device_memory)
    expected = kv_cases.contents(device)
    expected[:, [4, 5]] = expected[:, [0, 0]]
    copying = CopyStream(DEVICE)
    copying.stream.wait_stream(torch.cuda.current_stream())
    copying.stage(BlockMap(device, device), [0, 0], [4, 5]).trigger_all_layers()
    copying.synchronize()
    assert torch.equal(kv_cases.contents(device), expected)
    with pytest.raises(BlockCopyError, match="no processor reaches from host storage"):
        BlockMap(cache_of(SPEC, 2, host_memory), device)
    with pytest.raises(BlockCopyError, match="copy stream of cpu"):
        CopyStream("cpu").stage(BlockMap(cache_of(SPEC, 2, pinned_memory), device), [0], [0])


def test_addresses_beyond_31_bits():
    block, blocks = 1 << 20, 5000
    kv = torch.zeros(blocks, block, device=DEVICE, dtype=torch.uint8)
    kv[[0, 4999, 2500]] = torch.tensor([[1], [2], [3]], device=DEVICE, dtype=torch.uint8)
    other = torch.zeros(3, block, device=DEVICE, dtype=torch.uint8)
    copy_blocks(as_blocks(kv), [4999, 0, 2500], as_blocks(other), [0, 1, 2])
    assert other.float().mean(1).tolist() == [2, 1, 3]
    copy_blocks(as_blocks(other), [0], as_blocks(kv), [4998])
    assert (kv[4998] == 2).all()


def test_memory_is_kept_while_a_copy_is_in_flight():
    spec = replace(SPEC, num_blocks=4)
    memories = [device_memory(spec.num_bytes), pinned_memory(spec.num_bytes)]
    views = [BlockView.over(spec, memory) for memory in memories]
    layer_of(views[0], 1, mutable=True).fill(3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # the first of a process makes its kernels ready, for longer than the sleep
    copy_blocks(views[0], [0], views[1], [0], stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SOME_MS)
    copy_blocks(views[0], [0, 1, 2, 3], views[1], [3, 2, 1, 0], stream)
    del views
    for memory in memories:
        with pytest.raises(StorageInUseError, match="in flight"):
            memory.close()
    stream.synchronize()
    assert (layer_of(BlockView.over(spec, memories[1]), 1, mutable=True).tensor() == 3).all()
    for memory in memories:
        memory.close()


def test_nothing_is_left_of_dropped_copies():
    host, device = cache_of(SPEC, 8, pinned_memory), cache_of(SPEC, 8, device_memory)
    pool = CopyStreams(DEVICE, 3)

    def once():
        copying = pool.acquire()
        staged = copying.stage(BlockMap(host, device), range(8), range(8))
        staged.trigger_layer(1)
        staged.trigger_all_layers()

    once()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        once()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert pool.num_free == 3


def test_pinned_memory_goes_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    pinned_memory(256 << 20).close()
    before = resident()
    for _ in range(4):
        pinned_memory(256 << 20).close()
    assert resident() < before + (128 << 20)


def test_memory_that_cannot_be_pinned_costs_no_later_launch_its_life(monkeypatch):
    for module in (storage_module, slab):
        monkeypatch.setattr(module, "PORTABLE_AND_MAPPED", 1 << 20)  # CUDA knows no such flag
    with pytest.raises(StorageError, match="cannot be pinned"):
        pinned_memory(1 << 20)
    torch.ones(1, device=DEVICE).add_(1)
    with pytest.raises(MemoryError, match="could not be pinned"):
        slab.HostSlab(40, 8 << 20, torch.device("cuda", 0))
    torch.ones(1, device=DEVICE).add_(1)


def test_pinned_memory_outlives_its_storage_in_a_tensor():
    storage = pinned_memory(1 << 20)
    tensor = storage.tensor()[100:]
    assert tensor.is_pinned()
    storage.close()
    del storage
    gc.collect()
    assert tensor.is_pinned()
    tensor.fill_(4)
    assert (tensor.to(DEVICE, non_blocking=True) == 4).all()


def test_views_of_device_memory():
    storage = device_memory(4096)
    view = TensorView(storage, (8, 16), torch.float32, (32, 2))
    view.fill(0)
    view[3, 4] = 7
    assert view[3, 4] == 7 and view.tensor()[3, 4] == 7 and torch.from_dlpack(view)[3, 4] == 7
    with pytest.raises(StorageError, match="can't be a numpy array"):
        view.array()
    host = TensorView(pinned_memory(4096), (8, 16), torch.float32)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    view.d2h(host, stream).synchronize()
    assert host.array()[3, 4] == 7 and host.array().sum() == 7
    host.array()[:] = np.arange(128).reshape(8, 16)
    host.h2d(view, stream).synchronize()
    assert view[7, 15] == 127
    memory = memory_of(view.tensor())
    assert (memory.kind, memory.address) == (Kind.DEVICE, storage.address)


def test_borrowed_device_memory_keeps_its_owner():
    class Owner:
        pass

    owner = Owner()
    owner.tensor = torch.arange(1000, device=DEVICE, dtype=torch.int32)
    gone = weakref.ref(owner)
    storage = borrowed_memory(owner.tensor.data_ptr() + 40, 400, Kind.DEVICE, owner)
    view = TensorView(storage, (100,), torch.int32)
    assert view[5] == 15
    view[5] = -1
    assert owner.tensor[15] == -1
    del owner
    gc.collect()
    assert view[6] == 16 and gone() is not None
    del view
    storage.close()
    gc.collect()
    assert gone() is None
