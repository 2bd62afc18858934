"""Copies of KV blocks against what numpy's indexing says, for any allocator: on the CPU and on a GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from shoal.kv.block_map import BlockMap, Ids, Shards, reachable
from shoal.kv.copy import CopyStream, copy_blocks
from shoal.kv.layout import CacheSpec, Layout, contiguous_strides
from shoal.kv.library.copies import copy_layer
from shoal.kv.library.files import DirectFile, mapped_file
from shoal.kv.library.tensor_view import TensorView, layer_of
from shoal.kv.storage import Storage, host_memory
from shoal.kv.view import BlockView

Allocate = Callable[[int], Storage]
AXES = ("block", "kv", "token", "head", "item")


def host_kinds(folder: Path) -> list[Allocate]:
    """Plain memory, and files of both kinds in `folder`."""
    count = itertools.count()
    return [
        host_memory,
        lambda n: mapped_file(folder / str(next(count)), n),
        lambda n: DirectFile(folder / str(next(count)), n),
    ]


def on_host(view: TensorView) -> torch.Tensor:
    """A copy of any view."""
    if not view.num_items:
        return torch.empty(view.shape, dtype=view.dtype)
    host = TensorView(host_memory(view.num_items * view.dtype.itemsize), view.shape, view.dtype)
    view.copy_to(host)
    return host.tensor()


def contents(cache: BlockView) -> torch.Tensor:
    """[layers, blocks, 2, tokens, heads, bytes of a head], whatever the layout."""
    order = [cache.spec.layout.axes.index(axis) for axis in AXES]
    layers = [
        on_host(layer_of(cache, i)).permute(order).contiguous().view(torch.uint8)
        for i in range(cache.spec.num_layers)
    ]
    return torch.stack(layers)


def new_cache(spec: CacheSpec, num_blocks: int, allocate: Allocate, rng: random.Random) -> BlockView:
    """A cache of random bytes, not at the beginning of its storage."""
    spec = replace(spec, num_blocks=num_blocks)
    offset = 64 * rng.randrange(3)
    storage = allocate(offset + spec.num_bytes + rng.randrange(3))
    noise = TensorView(host_memory(storage.num_bytes), (storage.num_bytes,), torch.uint8)
    noise.tensor().copy_(
        torch.randint(
            0, 256, (storage.num_bytes,), generator=torch.Generator().manual_seed(rng.randrange(1 << 30))
        )
    )
    noise.copy_to(TensorView(storage, (storage.num_bytes,), torch.uint8))
    return BlockView.over(spec, storage, offset)


def empty_cache(spec: CacheSpec, num_blocks: int, allocate: Allocate = host_memory) -> BlockView:
    """In a storage of its own."""
    spec = replace(spec, num_blocks=num_blocks)
    return BlockView.over(spec, allocate(spec.num_bytes))


def random_spec(rng: random.Random) -> CacheSpec:
    dtype = rng.choice(("float32", "float16", "bfloat16", "uint8", "float8_e4m3fn"))
    return CacheSpec(
        rng.choice(list(Layout)),
        rng.randint(1, 4),
        rng.choice((1, 2, 3, 6)),
        rng.choice((1, 3, 8, 16, 40)),
        dtype,
        rng.choice((1, 2, 3, 16)),
        planes=rng.choice((1, 2, 2)),
    )


def few_specs(rng: random.Random) -> CacheSpec:
    """For a device, where each shape is a compilation."""
    return rng.choice(
        (
            CacheSpec(Layout.WHOLE_BLOCKS, 3, 12, 64, "bfloat16", 16),
            CacheSpec(Layout.KV_FIRST, 2, 12, 5, "uint8", 3),
        )
    )


def copy_whole(srcs: Shards, src_ids: Ids, dsts: Shards, dst_ids: Ids) -> None:
    """As copy_blocks, and done when it returns: no stream waits for what the host reads in pinned memory."""
    event = copy_blocks(srcs, src_ids, dsts, dst_ids)
    if event is not None:
        event.synchronize()


def check_random_copies(
    seed: int,
    rounds: int,
    allocators: Sequence[tuple[Allocate, Allocate]],
    new_spec: Callable[[random.Random], CacheSpec] = random_spec,
) -> None:
    rng = random.Random(seed)
    for i in range(rounds):
        spec = new_spec(rng)
        from_memory, to_memory = allocators[i % len(allocators)]
        src = new_cache(spec, rng.randint(1, 9), from_memory, rng)
        dst = new_cache(replace(spec, layout=rng.choice(list(Layout))), rng.randint(1, 9), to_memory, rng)
        dst_ids = rng.sample(range(dst.spec.num_blocks), rng.randint(0, dst.spec.num_blocks))
        src_ids = [rng.randrange(src.spec.num_blocks) for _ in dst_ids]
        before, expected = contents(src), contents(dst)
        expected[:, dst_ids] = before[:, src_ids]
        copy_whole(src, src_ids, dst, dst_ids)
        assert torch.equal(contents(dst), expected), (spec, dst.spec.layout, src_ids, dst_ids)
        assert torch.equal(contents(src), before), "the source changed"


def check_ids_are_honoured(layout: Layout, allocate_src: Allocate, allocate_dst: Allocate) -> None:
    """A duplicate source, a destination order of its own, values that show where they come from."""
    spec = CacheSpec(layout, 2, 2, 4, "float32", 2)
    src, dst = (
        new_cache(spec, 6, allocate_src, random.Random(1)),
        new_cache(spec, 5, allocate_dst, random.Random(2)),
    )
    axis = layout.axes.index("block")
    for layer in range(2):
        for block in range(6):
            layer_of(src, layer, mutable=True).slice(axis, block, block + 1).fill(100 * layer + block)
    copy_whole(src, [1, 2, 2, 3, 5], dst, [0, 3, 2, 1, 4])
    for layer in range(2):
        for block, source in enumerate((1, 3, 2, 2, 5)):
            assert (on_host(layer_of(dst, layer).slice(axis, block, block + 1)) == 100 * layer + source).all()


def check_a_round_trip_layer_by_layer(
    device: str, host: Allocate, on_device: Allocate, layouts: tuple[Layout, Layout]
) -> None:
    """Eight host blocks, four device blocks; there in order, back reversed, each layer at its own time."""
    spec = CacheSpec(layouts[0], 2, 2, 2, "float32", 2)
    outside = new_cache(spec, 8, host, random.Random(1))
    inside = new_cache(replace(spec, layout=layouts[1]), 4, on_device, random.Random(2))
    axis = spec.layout.axes.index("block")
    for layer in range(2):
        for block in range(8):
            layer_of(outside, layer, mutable=True).slice(axis, block, block + 1).fill(block)
    copying = CopyStream(device)
    there = copying.stage(BlockMap(outside, inside), [0, 1, 2, 3], [0, 1, 2, 3])
    there.trigger_layer(1)
    there.trigger_all_layers()
    copying.synchronize()
    for layer in range(2):
        layer_of(outside, layer, mutable=True).fill(0)
    back_map = BlockMap(inside, outside)
    back = copying.stage(back_map, [3, 2, 1, 0], [0, 1, 2, 3])
    back.trigger_layer(0)
    copying.synchronize()
    held = [
        [
            int(on_host(layer_of(outside, layer).slice(axis, block, block + 1)).flatten()[0])
            for block in range(8)
        ]
        for layer in range(2)
    ]
    assert held == [[3, 2, 1, 0, 0, 0, 0, 0], [0] * 8], "only the layer that was triggered has travelled"
    # A second call does nothing: what is overwritten in between stays.
    layer_of(outside, 0, mutable=True).fill(9)
    back.trigger_layer(0)
    back.trigger_layer(1)
    back.wait_layer(1)
    copying.synchronize()
    for block in range(4):
        assert (on_host(layer_of(outside, 0).slice(axis, block, block + 1)) == 9).all()
        assert (on_host(layer_of(outside, 1).slice(axis, block, block + 1)) == 3 - block).all()
    # Other blocks by the same map, and two copies that are under way together.
    again, others = (
        copying.stage(back_map, [3, 2, 1, 0], [0, 1, 2, 3]),
        copying.stage(back_map, [2, 2], [7, 6]),
    )
    others.trigger_layer(1)
    again.trigger_all_layers()
    others.trigger_all_layers()
    copying.synchronize()
    assert torch.equal(contents(outside)[:, :4], contents(inside)[:, [3, 2, 1, 0]])
    assert torch.equal(contents(outside)[:, 6:], contents(inside)[:, [2, 2]])


def shards_of(
    spec: CacheSpec, tp_size: int, num_blocks: int, allocate: Allocate, rng: random.Random
) -> list[BlockView]:
    """Ranks that hold the same heads have the same bytes."""
    shards: list[BlockView] = []
    for rank in range(tp_size):
        new = new_cache(replace(spec, tp_size=tp_size, tp_rank=rank), num_blocks, allocate, rng)
        if shards and shards[-1].spec.first_head == new.spec.first_head:
            for layer in range(spec.num_layers):
                layer_of(shards[-1], layer).copy_to(layer_of(new, layer, mutable=True))
        shards.append(new)
    return shards


def merged(shards: Sequence[BlockView]) -> torch.Tensor:
    """As one rank would have it."""
    by_first_head = {shard.spec.first_head: contents(shard) for shard in shards}
    return torch.cat([by_first_head[head] for head in sorted(by_first_head)], dim=4)


def many_heads(rng: random.Random) -> CacheSpec:
    return replace(random_spec(rng), num_heads=rng.choice((1, 2, 4, 6, 8, 12)))


def tp_sizes(num_heads: int) -> list[int]:
    return [size for size in range(1, 17) if num_heads % size == 0 or size % num_heads == 0]


def check_random_shards(
    seed: int,
    rounds: int,
    allocators: Sequence[tuple[Allocate, Allocate]],
    new_spec: Callable[[random.Random], CacheSpec] = many_heads,
    sizes: tuple[int, int] | None = None,
) -> None:
    """`sizes`: the tensor-parallel sizes of both sides; without them, any that go with the heads."""
    rng = random.Random(seed)
    for i in range(rounds):
        spec = new_spec(rng)
        src_tp, dst_tp = sizes or [rng.choice(tp_sizes(spec.num_heads)) for _ in range(2)]
        from_memory, to_memory = allocators[i % len(allocators)]
        srcs = shards_of(spec, src_tp, rng.randint(1, 6), from_memory, rng)
        other = replace(spec, layout=rng.choice((spec.layout, *Layout)))
        dsts = shards_of(other, dst_tp, rng.randint(1, 6), to_memory, rng)
        wanted = rng.sample(dsts, rng.randint(1, len(dsts)))
        dst_ids = rng.sample(range(dsts[0].spec.num_blocks), rng.randint(0, dsts[0].spec.num_blocks))
        src_ids = [rng.randrange(srcs[0].spec.num_blocks) for _ in dst_ids]
        whole, expected = merged(srcs), [contents(dst) for dst in dsts]
        layers = copy_some_layers(rng.sample(srcs, len(srcs)), src_ids, wanted, dst_ids, rng)
        for dst, data in zip(dsts, expected):
            if dst in wanted:
                heads = slice(dst.spec.first_head, dst.spec.first_head + dst.spec.heads)
                for layer in layers:
                    data[layer, dst_ids] = whole[layer, src_ids][..., heads, :]
            assert torch.equal(contents(dst), data), (spec, src_tp, dst_tp, src_ids, dst_ids, layers)


def copy_some_layers(
    srcs: list[BlockView], src_ids: list[int], dsts: list[BlockView], dst_ids: list[int], rng: random.Random
) -> Sequence[int]:
    """In one of the ways that there are. Returns the layers that were copied."""
    every = range(srcs[0].spec.num_layers)
    way = rng.choice(("all", "one", "some"))
    if way == "all" or not reachable(srcs, dsts):
        copy_whole(srcs, src_ids, dsts, dst_ids)
        return every
    block_map = BlockMap(srcs, dsts)
    if way == "one":
        layer = rng.choice(every)
        copy_layer(block_map, layer, src_ids, dst_ids)
        return [layer]
    copying = CopyStream(block_map.devices[0] if block_map.devices else "cpu")
    if copying.stream is not None:
        copying.stream.wait_stream(torch.cuda.current_stream(copying.device))
    copy = copying.stage(block_map, src_ids, dst_ids)
    layers = rng.sample(every, rng.randint(0, len(every)))
    for layer in layers:
        copy.trigger_layer(layer)
    copying.synchronize()
    return layers


def check_the_permutation(allocate: Allocate) -> None:
    """16 heads for four ranks, value = 1000 kv + 100 block + 10 token + head + 0.1 item: reshape and
    permute(3, 0, 1, 2, 4, 5)."""
    spec = CacheSpec(Layout.KV_FIRST, 1, 16, 6, "float32", 2, num_blocks=8)
    rng = random.Random(3)
    src = new_cache(spec, 8, allocate, rng)
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in spec.layer_shape), indexing="ij")
    values = sum(scale * axis for scale, axis in zip((1000, 100, 10, 1, 0.1), grid))
    assert isinstance(values, torch.Tensor)
    TensorView.of(values).copy_to(layer_of(src, 0, mutable=True))
    storage = allocate(spec.num_bytes)
    ranks = [replace(spec, tp_size=4, tp_rank=rank) for rank in range(4)]
    dsts = [BlockView.over(rank, storage, rank.tp_rank * rank.num_bytes) for rank in ranks]
    copy_whole([src], range(8), dsts, range(8))
    expected = values.reshape(2, 8, 2, 4, 4, 6).permute(3, 0, 1, 2, 4, 5).contiguous()
    shape = tuple(expected.shape)
    assert torch.equal(
        on_host(TensorView(storage, shape, torch.float32, contiguous_strides(shape))), expected
    )
    back = new_cache(spec, 8, allocate, rng)
    copy_whole(dsts, [7, 0, 0], [back], [0, 1, 5])
    assert torch.equal(contents(back)[:, [0, 1, 5]], contents(src)[:, [7, 0, 0]])
