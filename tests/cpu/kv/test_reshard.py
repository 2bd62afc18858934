"""Blocks laid out for another tensor-parallel size: reshape and permute are the oracle."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from shoal.kernels import block_copy_triton
from shoal.kv import copy
from shoal.kv.layout import CacheSpec, Layout, LayoutError
from shoal.kv.reshard import reshard
from shoal.kv.storage import host_memory
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
    kv_cases.check_random_reshards(
        seed=21, rounds=6 if way == "kernel" else 60, allocators=[(host_memory, host_memory)]
    )


def test_any_kinds(tmp_path, monkeypatch):
    kinds = kv_cases.host_kinds(tmp_path)
    monkeypatch.setattr(copy, "STAGING_BYTES", 5000)
    kv_cases.check_random_reshards(seed=22, rounds=27, allocators=list(itertools.product(kinds, kinds)))


def shards(tp_size, ranks, spec=SPEC):
    return [kv_cases.empty_cache(replace(spec, tp_size=tp_size, tp_rank=rank), 2) for rank in ranks]


def test_a_rank_takes_its_share_from_the_ranks_that_have_it():
    reshard(shards(4, [2, 3]), [0], shards(2, [1]), [1])
    with pytest.raises(LayoutError, match=r"no source has head 4: the sources are ranks \[1, 3\] of 4"):
        reshard(shards(4, [1, 3]), [0], shards(2, [1]), [1])


def test_shards_that_do_not_go_together():
    for srcs, dsts, said in (
        ([], shards(1, [0]), "one source and one destination"),
        (shards(2, [0, 1]), [*shards(4, [0]), *shards(2, [1])], "tp_size is 4 on one rank and 2"),
        (shards(1, [0]), shards(1, [0], replace(SPEC, head_dim=8)), "head_dim is 4 on one side and 8"),
    ):
        with pytest.raises(LayoutError, match=said):
            reshard(srcs, [0], dsts, [0])
