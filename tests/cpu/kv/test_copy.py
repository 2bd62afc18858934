"""Copies of blocks: every pair of storages and layouts against an oracle, by each of the three ways; ids;
copy streams."""

import ctypes
import gc
import itertools
import os
import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from triton_compile import check_kernels

from shoal.errors import UnavailableError
from shoal.kernels.copy import block_copy, block_copy_triton
from shoal.kv import copy
from shoal.kv.block_map import BlockCopyError, BlockMap
from shoal.kv.copy import CopyStream, copy_blocks
from shoal.kv.layout import CacheSpec, Layout, LayoutError
from shoal.kv.library.copies import CopyStreams, copy_layer
from shoal.kv.library.files import DirectFile
from shoal.kv.library.tensor_view import TensorView, blocks_of, layer_of
from shoal.kv.storage import host_memory, memory_of
from shoal.kv.view import BlockView
from tests import kv_cases

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 2, 4, 8, "float16", 4)
QWEN3_8B = CacheSpec(Layout.WHOLE_BLOCKS, 36, 8, 128, "bfloat16", 16)


def by_kernel(pieces, src_ids, dst_ids):
    """In the interpreter, which takes addresses of host memory."""
    addresses = torch.from_numpy(np.concatenate((pieces.src, pieces.dst)))
    block_copy_triton.copy_by_kernel(pieces, addresses, torch.from_numpy(np.concatenate((src_ids, dst_ids))))


def by_runs(pieces, src_ids, dst_ids):
    """Copies runs, as the copy engines do."""
    for src, dst in zip(*(addresses.tolist() for addresses in block_copy.runs(pieces, src_ids, dst_ids))):
        ctypes.memmove(dst, src, pieces.run)


@pytest.fixture(params=["host", "kernel", "runs"])
def way(request, monkeypatch):
    if request.param != "host":
        monkeypatch.setattr(copy, "copy_on_host", {"kernel": by_kernel, "runs": by_runs}[request.param])
    return request.param


def test_ids_are_honoured_in_every_layout(way):
    for layout in Layout:
        kv_cases.check_ids_are_honoured(layout, host_memory, host_memory)


def test_random_copies_between_layouts_equal_indexing(way, monkeypatch):
    monkeypatch.setattr(block_copy_triton, "TILE_BYTES", 256)  # several tiles a run, and runs a tile
    kv_cases.check_random_copies(
        seed=7, rounds=15 if way == "kernel" else 60, allocators=[(host_memory, host_memory)]
    )


def test_random_copies_between_kinds_equal_indexing(tmp_path, monkeypatch):
    kinds = kv_cases.host_kinds(tmp_path)
    monkeypatch.setattr(copy, "STAGING_BYTES", 5000)
    kv_cases.check_random_copies(seed=8, rounds=45, allocators=list(itertools.product(kinds, kinds)))


def test_groups_of_layers_share_one_memory(way):
    """Blocks of two groups have equal bytes, but different layers, planes and tokens; a third cache of other
    layout and ranks gets one group's blocks, and the other's keep their bytes."""
    rng = random.Random(5)
    wide = CacheSpec(Layout.WHOLE_BLOCKS, 2, 4, 8, "float16", 4, num_blocks=7)
    latent = replace(wide, num_layers=3, num_heads=1, head_dim=20, block_size=8, planes=1)
    latent = replace(latent, padding=wide.block_bytes - latent.block_bytes)
    assert latent.padding == 64 and latent.num_bytes == wide.num_bytes
    src, dst = (kv_cases.new_cache(wide, 7, host_memory, rng) for _ in range(2))
    for spec, ids in ((wide, [0, 3]), (latent, [5, 1])):
        views = [
            BlockView.over(spec, view.storage, int(view.addresses[0] - view.storage.address))
            for view in (src, dst)
        ]
        expected, others = kv_cases.contents(views[1]), [i for i in range(7) if i not in ids]
        expected[:, ids] = kv_cases.contents(views[0])[:, ids]
        before = kv_cases.contents(dst)[:, others]
        copy_blocks(views[0], ids, views[1], ids)
        assert torch.equal(kv_cases.contents(views[1]), expected)
        assert torch.equal(kv_cases.contents(dst)[:, others], before)
        plain = replace(spec, padding=0, layout=Layout.KV_FIRST)
        shards = kv_cases.shards_of(replace(plain, tp_size=2), 2, 7, host_memory, rng)
        copy_blocks(views[0], ids, shards, [2, 4])
        assert torch.equal(kv_cases.merged(shards)[:, [2, 4]], kv_cases.contents(views[0])[:, ids])


def test_layers_in_storages_of_their_own(tmp_path):
    """Other engines allocate each layer by itself; two files may then have equal offsets."""
    spec = replace(SPEC, layout=Layout.BLOCK_FIRST, num_blocks=3)
    rng = random.Random(4)

    def cache(allocate):
        layers = [
            TensorView(allocate(3 * spec.block_layer_bytes, i), spec.layer_shape, torch.float16)
            for i in range(2)
        ]
        for layer in layers:
            layer.fill(rng.randrange(100))
        return BlockView(spec, layers)

    memory, file = cache(lambda n, i: host_memory(n)), cache(lambda n, i: DirectFile(tmp_path / str(i), n))
    other = cache(lambda n, i: DirectFile(tmp_path / f"other{i}", n))
    copy_blocks(memory, [2, 0], file, [0, 1])
    copy_blocks(file, [0, 1], other, [1, 2])
    assert torch.equal(kv_cases.contents(other)[:, 1:], kv_cases.contents(memory)[:, [2, 0]])


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "said"),
    [
        ([0, 1], [0], "2 source blocks and 1 destination"),
        ([3], [0], "source block 3 does not exist: ids go from 0 to 2"),
        ([0.7], [0], "source blocks .0.7. must be a list of integers"),
        ([0], [[1]], "destination blocks"),
        ([2**64], [0], "source blocks"),
        ([0], [-1], "destination block -1"),
        ([0], [4], "ids go from 0 to 3"),
        ([0, 1, 2], [1, 3, 1], "block 1 is named more than once"),
    ],
)
def test_ids_that_are_refused(src_ids, dst_ids, said):
    src, dst = (kv_cases.empty_cache(SPEC, n) for n in (3, 4))
    block_map = BlockMap(src, dst)
    for refused in (
        lambda: copy_blocks(src, src_ids, dst, dst_ids),
        lambda: copy_layer(block_map, 0, src_ids, dst_ids),
        lambda: CopyStream("cpu").stage(block_map, src_ids, dst_ids),
    ):
        with pytest.raises(BlockCopyError, match=said):
            refused()


@pytest.mark.parametrize(
    "change",
    [
        dict(num_layers=3),
        dict(num_heads=2),
        dict(head_dim=4),
        dict(dtype="bfloat16"),
        dict(block_size=8),
        dict(planes=1),
    ],
    ids=str,
)
def test_caches_that_do_not_go_together(change):
    other = replace(SPEC, **change)
    src, dst = (kv_cases.empty_cache(spec, 2) for spec in (SPEC, other))
    for refused in (lambda: copy_blocks(src, [0], dst, [0]), lambda: BlockMap(src, dst)):
        with pytest.raises(LayoutError, match=f"{next(iter(change))} is .* on one side"):
            refused()


def test_copies_within_one_memory():
    memory = host_memory(8 * SPEC.block_bytes)
    spec = replace(SPEC, num_blocks=4)
    cache = BlockView.over(spec, memory)
    for block in range(4):
        layer_of(cache, 0, mutable=True).slice(0, block, block + 1).fill(block)
    copy_blocks(cache, [0, 0], cache, [2, 3])
    assert [layer_of(cache, 0)[block, 0, 0, 0, 0] for block in range(4)] == [0, 1, 0, 0]
    with pytest.raises(BlockCopyError, match="block 1 is read and written"):
        copy_blocks(cache, [0, 1], cache, [1, 2])
    transposed = BlockView.over(replace(spec, layout=Layout.KV_FIRST), memory)
    for other in (BlockView.over(spec, memory, offset=SPEC.block_bytes), transposed):
        with pytest.raises(BlockCopyError, match="overlap"):
            copy_blocks(cache, [0], other, [3])
    copy_blocks(cache, [1], BlockView.over(spec, memory, offset=4 * SPEC.block_bytes), [1])


def test_caches_whose_layers_lie_between_each_other():
    spec = replace(SPEC, layout=Layout.BLOCK_FIRST, num_blocks=3)
    memory, layer = host_memory(4 * 3 * spec.block_layer_bytes), 3 * spec.block_layer_bytes
    caches = [
        BlockView(
            spec,
            [
                TensorView(memory, spec.layer_shape, torch.float16, offset=(2 * i + first) * layer)
                for i in range(2)
            ],
        )
        for first in range(2)
    ]
    layer_of(caches[0], 1, mutable=True).fill(4)
    copy_blocks(caches[0], [0, 1, 2], caches[1], [2, 1, 0])
    assert (layer_of(caches[1], 1).array() == 4).all() and not layer_of(caches[1], 0).array().any()


def test_a_read_only_destination():
    spec = replace(SPEC, layout=Layout.BLOCK_FIRST, num_blocks=2)
    layers = [
        TensorView(host_memory(1 << 16), spec.layer_shape, torch.float16, mutable=False) for _ in range(2)
    ]
    cache = BlockView(spec, layers)
    with pytest.raises(BlockCopyError, match="read-only"):
        copy_blocks(cache, [0], cache, [1])
    copy_blocks(cache, [0], kv_cases.empty_cache(spec, 2), [0])


def test_a_round_trip_layer_by_layer(way):
    for layouts in itertools.product(Layout, Layout):
        kv_cases.check_a_round_trip_layer_by_layer("cpu", host_memory, host_memory, layouts)


def test_an_engines_cache_to_a_slab_and_back():
    spec = CacheSpec(Layout.WHOLE_BLOCKS, 2, 3, 5, "float32", 4, num_blocks=9)
    rng = random.Random(3)
    kv, slab = torch.rand(spec.shape), torch.zeros(12, spec.block_bytes, dtype=torch.uint8)
    inside = blocks_of(spec, kv)
    outside = BlockView.over(replace(spec, num_blocks=12), memory_of(slab))
    there, back = BlockMap(inside, outside), BlockMap(outside, inside)
    copying = CopyStream("cpu")
    for _ in range(20):
        slots = rng.sample(range(12), rng.randint(0, 9))
        blocks = rng.sample(range(9), len(slots))
        before = kv.clone()
        assert copying.stage(there, blocks, slots).trigger_all_layers() is None
        kv.zero_()
        copying.stage(back, slots, blocks).trigger_all_layers()
        assert torch.equal(kv[blocks], before[blocks])
        assert torch.equal(slab[slots].view(torch.float32).flatten(), before[blocks].flatten())
        kv.copy_(before)


def test_a_staged_copy_says_what_is_wrong():
    copy = CopyStream("cpu").stage(BlockMap(*(kv_cases.empty_cache(SPEC, 3) for _ in range(2))), [0], [0])
    for wrong in (-1, 2):
        for refused in (copy.trigger_layer, copy.event, copy.wait_layer):
            with pytest.raises(BlockCopyError, match="layers go from 0 to 1"):
                refused(wrong)
    with pytest.raises(BlockCopyError, match="has not been triggered"):
        copy.wait_layer(1)
    copy.trigger_layer(1)
    copy.wait_layer(1)
    assert copy.event(1) is None


def test_dropped_copy_streams_return_to_their_pool():
    pool = CopyStreams("cpu", 2)
    held = [pool.acquire(), pool.acquire()]
    with pytest.raises(UnavailableError, match="all 2 copy streams"):
        pool.acquire()
    held.pop()
    gc.collect()
    assert pool.num_free == 1
    third = pool.acquire()
    del held, third
    assert pool.num_free == 2


def _launch(src_layout, dst_layout, tp=1, spec=QWEN3_8B):
    """The kernel at real sizes; the launch is all that counts, so the memory is not touched."""
    srcs = [kv_cases.empty_cache(replace(spec, layout=src_layout), 4)]
    shard = replace(spec, layout=dst_layout, tp_size=tp)
    dsts = [kv_cases.empty_cache(replace(shard, tp_rank=rank), 4) for rank in range(tp)]
    [pieces] = BlockMap(srcs, dsts).pieces[-1]
    by_kernel(pieces, np.arange(4), np.arange(4))


LAUNCHES = {
    f"{a} to {b}, tp 1 to {tp}": lambda a=a, b=b, tp=tp: _launch(a, b, tp)
    for a, b, tp in (
        (Layout.WHOLE_BLOCKS, Layout.WHOLE_BLOCKS, 1),
        (Layout.WHOLE_BLOCKS, Layout.WHOLE_BLOCKS, 4),
        (Layout.KV_FIRST, Layout.KV_FIRST, 4),
        (Layout.KV_FIRST, Layout.WHOLE_BLOCKS, 1),
    )
}
LAUNCHES["odd heads"] = lambda: _launch(
    Layout.KV_FIRST, Layout.WHOLE_BLOCKS, 1, CacheSpec(Layout.KV_FIRST, 3, 3, 20, "uint8", 5)
)


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case])


@pytest.mark.skipif(not os.path.exists("/dev/shm"), reason="no memory filesystem")
def test_files_in_memory(tmp_path):
    path = f"/dev/shm/shoal-test-{os.getpid()}"
    try:
        kv_cases.check_ids_are_honoured(Layout.KV_FIRST, host_memory, lambda n: DirectFile(path, n))
    finally:
        os.unlink(path)
