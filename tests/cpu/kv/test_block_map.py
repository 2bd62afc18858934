"""Block maps between shards of any tensor-parallel sizes, against indexing and against reshape and permute;
maps that are refused."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from shoal.kernels.copy import block_copy_triton
from shoal.kv import copy
from shoal.kv.block_map import BlockCopyError, BlockMap
from shoal.kv.copy import copy_blocks
from shoal.kv.layout import CacheSpec, Layout, LayoutError
from shoal.kv.library.files import DirectFile, mapped_file
from shoal.kv.storage import StorageInUseError, host_memory
from shoal.kv.view import BlockView
from tests import kv_cases

SPEC = CacheSpec(Layout.KV_FIRST, 2, 8, 4, "float16", 4)


@pytest.fixture(params=["host", "kernel"])
def way(request, monkeypatch):
    def by_kernel(pieces, src_ids, dst_ids):
        addresses = torch.from_numpy(np.concatenate((pieces.src, pieces.dst)))
        block_copy_triton.copy_by_kernel(
            pieces, addresses, torch.from_numpy(np.concatenate((src_ids, dst_ids)))
        )

    if request.param == "kernel":
        monkeypatch.setattr(copy, "copy_on_host", by_kernel)
    return request.param


def test_one_shard_for_four_is_a_permutation(way):
    kv_cases.check_the_permutation(host_memory)


def test_any_sizes_ids_and_layouts(way):
    rounds = 6 if way == "kernel" else 80
    kv_cases.check_random_shards(seed=21, rounds=rounds, allocators=[(host_memory, host_memory)])


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2)], ids=str)
def test_from_each_size_to_the_next_with_heads_that_several_ranks_hold(sizes, num_heads):
    kv_cases.check_random_shards(
        seed=23,
        rounds=6,
        allocators=[(host_memory, host_memory)],
        new_spec=lambda rng: replace(kv_cases.random_spec(rng), num_heads=num_heads),
        sizes=sizes,
    )


def test_any_kinds(tmp_path, monkeypatch):
    kinds = kv_cases.host_kinds(tmp_path)
    monkeypatch.setattr(copy, "STAGING_BYTES", 5000)
    kv_cases.check_random_shards(seed=22, rounds=27, allocators=list(itertools.product(kinds, kinds)))


def shards(tp_size, ranks, spec=SPEC):
    return [kv_cases.empty_cache(replace(spec, tp_size=tp_size, tp_rank=rank), 2) for rank in ranks]


def test_a_rank_takes_its_share_from_the_ranks_that_have_it():
    copy_blocks(shards(4, [2, 3]), [0], shards(2, [1]), [1])
    with pytest.raises(LayoutError, match=r"no source has head 4: the sources are ranks \[1, 3\] of 4"):
        copy_blocks(shards(4, [1, 3]), [0], shards(2, [1]), [1])


def test_shards_that_do_not_go_together(tmp_path):
    mapped = kv_cases.empty_cache(replace(SPEC, tp_size=2), 2, lambda n: mapped_file(tmp_path / "m", n))
    for srcs, dsts, said in (
        ([], shards(1, [0]), "one source and one destination"),
        (shards(1, [0]), [], "one source and one destination"),
        (shards(2, [0, 1]), [*shards(4, [0]), *shards(2, [1])], "tp_size is 4 on one rank and 2"),
        (shards(1, [0]), shards(1, [0], replace(SPEC, head_dim=8)), "head_dim is 4 on one side and 8"),
        ([mapped, *shards(2, [1])], shards(1, [0]), "in mapped storage on cpu and host storage on cpu"),
    ):
        with pytest.raises(LayoutError, match=said):
            BlockMap(srcs, dsts)
        with pytest.raises(LayoutError, match=said):
            copy_blocks(srcs, [0], dsts, [0])


def test_a_map_between_memories_that_no_processor_reaches(tmp_path):
    file = kv_cases.empty_cache(SPEC, 3, lambda n: DirectFile(tmp_path / "blocks", n))
    with pytest.raises(BlockCopyError, match="from host storage on cpu to direct storage on cpu"):
        BlockMap(kv_cases.empty_cache(SPEC, 3), file)


def test_a_map_keeps_its_storages_open():
    spec = replace(SPEC, num_blocks=3)
    memories = [host_memory(spec.num_bytes) for _ in range(2)]
    block_map = BlockMap(*(BlockView.over(spec, memory) for memory in memories))
    with pytest.raises(StorageInUseError):
        memories[0].close()
    del block_map
    for memory in memories:
        memory.close()


def test_whole_blocks_are_one_run_and_layers_of_other_layouts_are_not():
    spec = CacheSpec(Layout.WHOLE_BLOCKS, 2, 4, 8, "float16", 4)
    caches = {layout: kv_cases.empty_cache(replace(spec, layout=layout), 3) for layout in Layout}

    def shape(a, b):
        [pieces] = BlockMap(caches[a], kv_cases.empty_cache(caches[b].spec, 3)).pieces[-1]
        return len(pieces.src), pieces.sizes, pieces.run

    head, side = 8 * 2, spec.block_layer_bytes // 2
    assert shape(Layout.WHOLE_BLOCKS, Layout.WHOLE_BLOCKS) == (1, (1, 1, 1), spec.block_bytes)
    assert shape(Layout.BLOCK_FIRST, Layout.BLOCK_FIRST) == (2, (1, 1, 1), spec.block_layer_bytes)
    assert shape(Layout.KV_FIRST, Layout.KV_FIRST) == (2, (1, 1, 2), side)
    assert shape(Layout.KV_FIRST, Layout.BLOCK_FIRST) == (2, (1, 1, 2), side)
    assert shape(Layout.BLOCK_FIRST, Layout.WHOLE_BLOCKS) == (2, (2, 4, 4), head)
