"""Layouts of a cache, reasons why two caches do not fit, and heads that ranks share."""

import msgspec
import pytest
from msgspec.structs import replace

from shoal.kinds.rope import RopeConfig
from shoal.kv.layout import CacheSpec, Layout, LayoutError, SharedHeads, contiguous_strides, shared_heads
from shoal.model_config import AttentionKind

QWEN = CacheSpec(Layout.WHOLE_BLOCKS, 36, 8, 128, "bfloat16", 16, num_blocks=10)


def ranks(tp_size, num_heads=8, **changes):
    return [
        replace(QWEN, num_heads=num_heads, tp_size=tp_size, tp_rank=rank, **changes)
        for rank in range(tp_size)
    ]


def test_bytes_of_a_model_that_exists():
    sizes = QWEN.token_layer_bytes, QWEN.block_layer_bytes, QWEN.block_bytes, QWEN.num_bytes
    assert sizes == (4096, 64 << 10, 36 * 64 << 10, 10 * 36 * 64 << 10)
    shard = replace(QWEN, tp_size=4, tp_rank=3)
    assert (shard.heads, shard.first_head, shard.block_bytes * 4) == (2, 6, QWEN.block_bytes)


@pytest.mark.parametrize(
    ("layout", "whole", "shape", "strides", "second"),
    [
        (
            Layout.KV_FIRST,
            (36, 2, 10, 16, 8, 128),
            (2, 10, 16, 8, 128),
            (163840, 16384, 1024, 128, 1),
            655360,
        ),
        (
            Layout.BLOCK_FIRST,
            (36, 10, 2, 16, 8, 128),
            (10, 2, 16, 8, 128),
            (32768, 16384, 1024, 128, 1),
            655360,
        ),
        (
            Layout.WHOLE_BLOCKS,
            (10, 36, 2, 8, 16, 128),
            (10, 2, 8, 16, 128),
            (36 * 32768, 16384, 2048, 128, 1),
            65536,
        ),
    ],
)
def test_layers_of_each_layout(layout, whole, shape, strides, second):
    spec = replace(QWEN, layout=layout)
    assert (spec.shape, spec.layer_shape, spec.layer_strides) == (whole, shape, strides)
    assert spec.layer_offset(1) == second


def test_a_latent_has_one_plane_that_every_rank_holds():
    latent = CacheSpec(Layout.WHOLE_BLOCKS, 27, 1, 576, "bfloat16", 32, num_blocks=5, planes=1)
    assert (latent.layer_shape, latent.token_layer_bytes) == ((5, 1, 1, 32, 576), 1152)
    for rank in range(4):
        spec = replace(latent, tp_size=4, tp_rank=rank)
        assert (spec.heads, spec.first_head, spec.block_bytes) == (1, 0, latent.block_bytes)


def test_padding_follows_each_block():
    spec = replace(QWEN, padding=4096)
    assert spec.block_bytes == QWEN.block_bytes + 4096 and spec.num_bytes == 10 * spec.block_bytes
    assert spec.shape == QWEN.shape and spec.layer_shape == QWEN.layer_shape
    assert spec.layer_strides == (QWEN.layer_strides[0] + 2048, *QWEN.layer_strides[1:])
    assert spec.layer_offset(1) == QWEN.layer_offset(1)


def test_a_spec_crosses_a_process_and_what_comes_is_checked():
    shard = replace(QWEN, tp_size=4, tp_rank=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shard), type=CacheSpec) == shard
    plain = msgspec.to_builtins(shard)
    for wrong in (
        {"tp_rank": 4},
        {"layout": "sideways"},
        {"num_blocks": 0},
        {"head_dim": "128"},
        {"colour": 1},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(plain | wrong, CacheSpec)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16, 32])
def test_ranks_hold_the_heads_that_the_model_gives_them(tp_size):
    attention = AttentionKind(32, 8, 128, 128**-0.5, RopeConfig(10000.0))
    replicas = attention.kv_head_replicas(tp_size)
    for spec in ranks(tp_size):
        assert spec.heads == attention.kv_heads_per_rank(tp_size)
        assert spec.first_head == spec.tp_rank // replicas * spec.heads


def test_contiguous_strides():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((7,)) == (1,)
    assert contiguous_strides(()) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(num_layers=0), "num_layers must be 1 or more, got 0"),
        (dict(head_dim=-1), "head_dim must be 1 or more, got -1"),
        (dict(block_size=0), "block_size must be 1 or more, got 0"),
        (dict(dtype="float12"), "float12"),
        (dict(num_blocks=0), "num_blocks must be 1 or more, got 0"),
        (dict(tp_size=3), "tp_size 3 neither divides 8 KV heads nor is a multiple of them"),
        (dict(tp_size=12), "tp_size 12 neither divides 8 KV heads"),
        (dict(tp_size=2, tp_rank=2), "ranks go from 0 to 1"),
        (dict(tp_rank=-1), "tp_rank is -1"),
        (dict(tp_size=0), "tp_size must be 1 or more, got 0"),
        (dict(planes=0), "planes must be 1 or more, got 0"),
        (dict(padding=-2), "padding must be a multiple of the 2 bytes of bfloat16, got -2"),
        (dict(padding=7), "padding must be a multiple of the 2 bytes of bfloat16, got 7"),
        (dict(layout=Layout.KV_FIRST, padding=2), "padding must be 0, got 2; the blocks of a kv_first cache"),
        (dict(layout="kv_first"), "layout must be one of Layout.KV_FIRST.*got 'kv_first'"),
    ],
    ids=str,
)
def test_caches_that_cannot_be(change, said):
    with pytest.raises(LayoutError, match=said):
        replace(QWEN, **change)


def test_reasons_why_two_caches_do_not_go_together():
    assert QWEN.mismatch(replace(QWEN)) is None
    other = replace(QWEN, layout=Layout.KV_FIRST, tp_size=2, tp_rank=1, num_blocks=7)
    assert QWEN.mismatch(other) is None and QWEN.mismatch(replace(QWEN, padding=64)) is None
    assert QWEN.mismatch(replace(other, dtype="float16", block_size=32)) == (
        "dtype is bfloat16 on one side and float16 on the other; block_size is 16 on one side and 32 on the "
        "other"
    )
    for change in (dict(num_layers=1), dict(num_heads=4), dict(head_dim=64), dict(planes=1)):
        assert next(iter(change)) in (QWEN.mismatch(replace(QWEN, **change)) or "")


def test_each_head_comes_from_the_rank_that_has_it():
    assert shared_heads(ranks(1), ranks(1)) == [SharedHeads(0, 0, 0, 0, 8)]
    assert shared_heads(ranks(1), ranks(2)) == [SharedHeads(0, 0, 0, 0, 4), SharedHeads(0, 4, 1, 0, 4)]
    assert shared_heads(ranks(4), ranks(2)) == [
        SharedHeads(0, 0, 0, 0, 2),
        SharedHeads(1, 0, 0, 2, 2),
        SharedHeads(2, 0, 1, 0, 2),
        SharedHeads(3, 0, 1, 2, 2),
    ]
    assert shared_heads(ranks(4, 12), ranks(3, 12))[:4] == [
        SharedHeads(0, 0, 0, 0, 1),
        SharedHeads(0, 1, 0, 1, 1),
        SharedHeads(0, 2, 0, 2, 1),
        SharedHeads(1, 0, 0, 3, 1),
    ]


def test_ranks_that_want_a_head_take_turns_among_those_that_hold_it():
    assert [shared.src_rank for shared in shared_heads(ranks(4, 2), ranks(8, 2))] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [shared.src_rank for shared in shared_heads(ranks(2, 2), ranks(4, 2))] == [0, 0, 1, 1]
    assert shared_heads(ranks(4, 2), ranks(1, 2)) == [SharedHeads(0, 0, 0, 0, 1), SharedHeads(2, 0, 0, 1, 1)]


def test_every_wanted_head_comes_once_from_a_holder():
    sizes = (1, 2, 3, 4, 6, 8, 12, 24)
    for num_heads in (1, 2, 4, 6, 12):
        fitting = [size for size in sizes if not (num_heads % size and size % num_heads)]
        for src_tp in fitting:
            for dst_tp in fitting:
                srcs, dsts = ranks(src_tp, num_heads), ranks(dst_tp, num_heads)
                got = {}
                for shared in shared_heads(srcs, dsts):
                    for i in range(shared.num_heads):
                        place = shared.dst_rank, shared.dst_head + i
                        assert place not in got
                        got[place] = srcs[shared.src_rank].first_head + shared.src_head + i
                        assert shared.src_head + i < srcs[shared.src_rank].heads
                wanted = {(dst.tp_rank, i): dst.first_head + i for dst in dsts for i in range(dst.heads)}
                assert got == wanted, (num_heads, src_tp, dst_tp)


def test_ranks_that_share_no_heads():
    two, four = ranks(2), ranks(4)
    assert shared_heads(four[2:], two[1:]) == [SharedHeads(2, 0, 1, 0, 2), SharedHeads(3, 0, 1, 2, 2)]
    for srcs, dsts, said in (
        ([], two, "one source and one destination at least"),
        (two, [], "one source and one destination at least"),
        ([two[1], two[1]], two, "each may come once"),
        (two, [four[0], two[1]], "tp_size is 4 on one rank and 2 on another"),
        (two, [two[0], replace(two[1], head_dim=8)], "ranks of one side do not go together: head_dim"),
        (two, ranks(2, head_dim=8), "head_dim is 128 on one side and 8"),
        ([four[1], four[3]], two[1:], r"no source has head 4: the sources are ranks \[1, 3\] of 4"),
        (two[:1], two[1:], "no source has head 4"),
    ):
        with pytest.raises(LayoutError, match=said):
            shared_heads(srcs, dsts)
