"""Copies of KV blocks: GB/s, and the share of what one large copy reaches in the same run.

    python benchmarks/kv_copy.py [--json PATH]

Blocks of 16 tokens at scattered ids, between the device and pinned host memory, by the copy engines and by
the kernel; layer by layer as a copy stream does it; within the device, from one tensor-parallel size and
layout to another; and, where there are two GPUs, from one to the other. The best of several runs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from msgspec.structs import replace
from report import write_json

from shoal.kv import block_map
from shoal.kv.block_map import BlockMap
from shoal.kv.copy import CopyStream, copy_blocks
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.storage import device_memory, memory_of, pinned_memory
from shoal.kv.view import BlockView

QWEN3_8B = CacheSpec(Layout.WHOLE_BLOCKS, 36, 8, 128, "bfloat16", 16)
BLOCKS = {
    "qwen3-8b": QWEN3_8B.block_bytes,
    "qwen3-0.6b": 28 * QWEN3_8B.block_layer_bytes,
    "qwen3-8b, tp 8": QWEN3_8B.block_bytes // 8,
    "128 KiB": 128 << 10,
    "64 KiB": 64 << 10,
    "16 KiB": 16 << 10,
}
TOTAL = 1 << 30
WAYS = {"engines": 1, "kernel": 1 << 60}  # DMA_BYTES


def seconds(run: Callable[[], object], stream: torch.cuda.Stream, times: int = 5) -> float:
    best = float("inf")
    for i in range(times + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        if i:  # the first compiles
            best = min(best, start.elapsed_time(end) / 1e3)
    return best


def row(
    rows: list[dict[str, Any]], case: str, way: str, num_bytes: int, took: float, plain: float, **more: float
) -> None:
    """`plain`: GB/s of one large copy."""
    rate = num_bytes / took / 1e9
    rows.append(dict(case=case, way=way, gb_per_s=round(rate, 2), of_plain=round(rate / plain, 4), **more))
    extra = "".join(f"  {name} {value:.2f}" for name, value in more.items())
    print(f"{case:44s} {way:8s} {rate:8.1f} GB/s {rate / plain:6.1%}{extra}", flush=True)


def over_pcie(rows: list[dict[str, Any]]) -> None:
    stream, rng = torch.cuda.Stream(), random.Random(1)
    start = time.perf_counter()
    slab, kv = pinned_memory(TOTAL).tensor(), torch.zeros(TOTAL, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    rows.append(dict(case="pinning 1 GiB", seconds=round(time.perf_counter() - start, 3)))
    print(f"pinning 1 GiB {rows[-1]['seconds']} s", flush=True)
    for out in (True, False):
        direction = "device to host" if out else "host to device"

        def plain_copy(out: bool = out) -> None:
            with torch.cuda.stream(stream):
                (slab.copy_(kv, non_blocking=True) if out else kv.copy_(slab, non_blocking=True))

        plain = TOTAL / seconds(plain_copy, stream) / 1e9
        print(f"{direction}: one copy of 1 GiB {plain:.1f} GB/s", flush=True)
        rows.append(
            dict(case=f"{direction}, one copy of 1 GiB", way="plain", gb_per_s=round(plain, 2), of_plain=1.0)
        )
        for name, block_bytes in BLOCKS.items():
            count = min(TOTAL // block_bytes, 8192)
            host_blocks, blocks = rng.sample(range(count), count), rng.sample(range(count), count)
            spec = CacheSpec(Layout.WHOLE_BLOCKS, 1, 1, block_bytes // 2, "uint8", 1, num_blocks=count)
            device, host = (BlockView.over(spec, memory_of(memory)) for memory in (kv, slab))
            ids = (blocks, host_blocks) if out else (host_blocks, blocks)
            for way, threshold in WAYS.items():
                with mock.patch.object(block_map, "DMA_BYTES", threshold):
                    direction_map = BlockMap(device, host) if out else BlockMap(host, device)
                    copying = CopyStream("cuda", stream)

                    def run(
                        copying: CopyStream = copying,
                        direction_map: BlockMap = direction_map,
                        ids: tuple[list[int], list[int]] = ids,
                    ) -> None:
                        copying.stage(direction_map, *ids).trigger_all_layers()

                    took = seconds(run, stream, 3)
                    start = time.perf_counter()
                    run()
                    called = time.perf_counter() - start
                row(rows, f"{direction}, {name}", way, count * block_bytes, took, plain, call_ms=called * 1e3)
        if not out:
            layer_by_layer(rows, slab, kv, plain)


def layer_by_layer(rows: list[dict[str, Any]], slab: torch.Tensor, kv: torch.Tensor, plain: float) -> None:
    """256 blocks of qwen3-8b, each layer on its own, 64 KiB or two halves of it."""
    for layout in (Layout.WHOLE_BLOCKS, Layout.KV_FIRST):
        spec = replace(QWEN3_8B, layout=layout, num_blocks=256)
        host, device = (BlockView.over(spec, memory_of(memory)) for memory in (slab, kv))
        ids = [random.Random(seed).sample(range(256), 256) for seed in (2, 3)]
        for way, threshold in WAYS.items():
            with mock.patch.object(block_map, "DMA_BYTES", threshold):
                copying, inwards = CopyStream("cuda"), BlockMap(host, device)

                def run(
                    copying: CopyStream = copying, inwards: BlockMap = inwards, ids: list[list[int]] = ids
                ) -> None:
                    staged = copying.stage(inwards, *ids)
                    for layer in range(inwards.num_layers):
                        staged.trigger_layer(layer)

                assert copying.stream is not None
                took = seconds(run, copying.stream, 3)
            row(rows, f"host to device, 8b by layer, {layout}", way, spec.num_bytes, took, plain)


def within_the_device(rows: list[dict[str, Any]]) -> None:
    num_blocks, rng = 1024, random.Random(2)
    whole = replace(QWEN3_8B, num_blocks=num_blocks)
    num_bytes = whole.num_bytes
    storages = [device_memory(num_bytes) for _ in range(2)]
    stream = torch.cuda.Stream()

    def plain_copy() -> None:
        with torch.cuda.stream(stream):
            storages[1].tensor().copy_(storages[0].tensor())

    plain = 2 * num_bytes / seconds(plain_copy, stream) / 1e9
    print(f"within the device: one copy {plain:.0f} GB/s read and written", flush=True)
    rows.append(dict(case="device, one copy", way="plain", gb_per_s=round(plain, 1), of_plain=1.0))
    engine, others = Layout.WHOLE_BLOCKS, Layout.KV_FIRST
    ids = [rng.sample(range(num_blocks), num_blocks) for _ in range(2)]
    for layouts, sizes in (
        ((engine, engine), (1, 4)),
        ((engine, engine), (4, 1)),
        ((engine, engine), (1, 8)),
        ((engine, engine), (2, 8)),
        ((others, others), (1, 4)),
        ((others, others), (4, 1)),
        ((others, engine), (1, 1)),
        ((engine, others), (1, 4)),
        ((engine, engine), (1, 1)),
    ):
        sides = []
        for storage, layout, size in zip(storages, layouts, sizes):
            shards = [replace(whole, layout=layout, tp_size=size, tp_rank=rank) for rank in range(size)]
            sides.append(
                [BlockView.over(shard, storage, i * shard.num_bytes) for i, shard in enumerate(shards)]
            )
        start = time.perf_counter()
        copy_blocks(sides[0], ids[0], sides[1], ids[1], stream)  # compiles
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        took = seconds(lambda sides=sides: copy_blocks(sides[0], ids[0], sides[1], ids[1], stream), stream)
        row(
            rows,
            f"device, tp {sizes[0]} to {sizes[1]}, {layouts[0]} to {layouts[1]}",
            "kernel",
            2 * num_bytes,
            took,
            plain,
            first_s=first,
        )


def between_gpus(rows: list[dict[str, Any]]) -> None:
    """From one GPU to another: whole blocks, each layer on its own, and from two ranks to one."""
    storages = [device_memory(TOTAL, f"cuda:{i}") for i in range(2)]
    stream = torch.cuda.Stream("cuda:0")

    def plain_copy() -> None:
        with torch.cuda.stream(stream):
            storages[1].tensor().copy_(storages[0].tensor(), non_blocking=True)

    plain = TOTAL / seconds(plain_copy, stream) / 1e9
    print(f"between two GPUs: one copy of 1 GiB {plain:.0f} GB/s", flush=True)
    rows.append(
        dict(case="between two GPUs, one copy of 1 GiB", way="plain", gb_per_s=round(plain, 1), of_plain=1.0)
    )
    whole = replace(QWEN3_8B, num_blocks=TOTAL // QWEN3_8B.block_bytes)
    ids = [random.Random(seed).sample(range(whole.num_blocks), whole.num_blocks) for seed in (4, 5)]
    for src_tp, dst_tp in ((1, 1), (2, 1), (1, 2)):
        sides = []
        for storage, size in zip(storages, (src_tp, dst_tp)):
            ranks = [replace(whole, tp_size=size, tp_rank=rank) for rank in range(size)]
            sides.append([BlockView.over(rank, storage, rank.tp_rank * rank.num_bytes) for rank in ranks])
        for way, threshold in WAYS.items():
            with mock.patch.object(block_map, "DMA_BYTES", threshold):
                copying, across = CopyStream("cuda:0", stream), BlockMap(*sides)

                def all_layers(copying: CopyStream = copying, across: BlockMap = across) -> None:
                    copying.stage(across, *ids).trigger_all_layers()

                def by_layer(copying: CopyStream = copying, across: BlockMap = across) -> None:
                    staged = copying.stage(across, *ids)
                    for layer in range(across.num_layers):
                        staged.trigger_layer(layer)

                for name, run in (("whole", all_layers), ("by layer", by_layer)):
                    took = seconds(run, stream, 3)
                    case = f"between two GPUs, tp {src_tp} to {dst_tp}, {name}"
                    row(rows, case, way, whole.num_bytes, took, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    within_the_device(rows)
    over_pcie(rows)
    if torch.cuda.device_count() > 1:
        between_gpus(rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
