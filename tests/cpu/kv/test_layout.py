"""Byte arithmetic of caches, and why two of them do not go together."""

from dataclasses import replace

import pytest

from shoal.kv.layout import CacheSpec, Layout, LayoutError, compatibility, contiguous_strides

QWEN = CacheSpec(Layout.WHOLE_BLOCKS, 36, 8, 128, "bfloat16", 16)


def test_bytes_of_a_model_that_exists():
    assert (QWEN.token_layer_bytes, QWEN.block_layer_bytes, QWEN.block_bytes) == (
        4096,
        64 << 10,
        36 * 64 << 10,
    )
    shard = replace(QWEN, tp_size=4, tp_rank=3)
    assert (shard.heads, shard.block_bytes * 4) == (2, QWEN.block_bytes)


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "second"),
    [
        (Layout.KV_FIRST, (2, 10, 16, 8, 128), (163840, 16384, 1024, 128, 1), 655360),
        (Layout.BLOCK_FIRST, (10, 2, 16, 8, 128), (32768, 16384, 1024, 128, 1), 655360),
        (Layout.WHOLE_BLOCKS, (10, 2, 8, 16, 128), (36 * 32768, 16384, 2048, 128, 1), 65536),
    ],
)
def test_layers_of_each_layout(layout, shape, strides, second):
    spec = replace(QWEN, layout=layout)
    assert (spec.layer_shape(10), spec.layer_strides(10), spec.layer_offset(1, 10)) == (
        shape,
        strides,
        second,
    )


def test_contiguous_strides():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((7,)) == (1,)
    assert contiguous_strides(()) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(num_layers=0), "num_layers is 0"),
        (dict(head_dim=-1), "head_dim is -1"),
        (dict(block_size=0), "block_size is 0"),
        (dict(dtype="float12"), "float12"),
        (dict(tp_size=3), "8 KV heads cannot be shared evenly by tp_size 3"),
        (dict(tp_size=2, tp_rank=2), "ranks go from 0 to 1"),
        (dict(tp_rank=-1), "tp_rank is -1"),
        (dict(tp_size=16), "only 8 KV heads"),
        (dict(tp_size=0), "tp_size is 0"),
        (dict(layout="kv_first"), "'kv_first' is none of Layout.KV_FIRST"),
    ],
    ids=str,
)
def test_caches_that_cannot_be(change, said):
    with pytest.raises(LayoutError, match=said):
        replace(QWEN, **change)


def test_reasons_why_two_caches_do_not_go_together():
    assert compatibility(QWEN, replace(QWEN)) == []
    other = replace(QWEN, layout=Layout.KV_FIRST, dtype="float16", tp_size=2, tp_rank=1)
    assert compatibility(QWEN, other) == [
        "layout is whole_blocks on one side and kv_first on the other",
        "dtype is bfloat16 on one side and float16 on the other",
        "tp_rank is 0 on one side and 1 on the other",
        "tp_size is 1 on one side and 2 on the other",
    ]
    assert compatibility(QWEN, replace(QWEN, tp_size=2), besides=("tp_size",)) == []
    ranks = [replace(QWEN, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert compatibility(*ranks) == ["tp_rank is 0 on one side and 1 on the other"], (
        "the same bytes of other heads are no copy"
    )
