"""KV blocks read from another worker, by each transport: GB/s, and the share of what one plain copy of as
many bytes reaches in the same run.

    python benchmarks/transport.py [--device cpu|cuda] [--transports NAME ...] [--blocks N] [--json PATH]

Blocks of qwen3-8b at scattered ids: all layers at once, layer by layer as a prefill reports them, and
between tensor-parallel sizes. The owner is a process of its own, but for in_process. With --device cuda its
cache is on the last GPU and the reader's on the first; with one GPU both are on that one. The best of several
runs."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec.structs import replace
from report import write_json

from shoal.errors import ShoalError
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.storage import Memory, device_memory, shared_memory
from shoal.kv.transfer.registry import TRANSPORTS, Transports
from shoal.kv.transfer.ticket import ExportAddress
from shoal.kv.transfer.transport import Peer, Pull, Reach
from shoal.kv.view import BlockView

QWEN3_8B = CacheSpec(Layout.WHOLE_BLOCKS, 36, 8, 128, "bfloat16", 16)
SIZES = ((1, 1), (2, 1), (1, 2))  # ranks of the owner, and of the reader, of whom one is measured
KINDS = {kind.name: kind for kind in TRANSPORTS}
RUNS = 4


def new_cache(spec: CacheSpec, device: str) -> BlockView:
    """On the CPU it is shared memory, which every transport can read."""
    memory: Memory = (
        shared_memory(spec.num_bytes) if device == "cpu" else device_memory(spec.num_bytes, device)
    )
    memory.tensor().fill_(1)  # pages that nobody has written cost nothing to read
    return BlockView.over(spec, memory)


def export_cache(
    name: str, specs: Sequence[CacheSpec], device: str
) -> tuple[list[BlockView], list[Any], list[tuple[ExportAddress, ...]]]:
    views = [new_cache(spec, device) for spec in specs]
    transports = Transports([KINDS[name]])
    exports = [transports.export_cache([view], Reach.PROCESS) for view in views]
    if device != "cpu":
        torch.cuda.synchronize(device)
    return views, exports, [one.addresses for one in exports]


def own(name: str, specs: Sequence[CacheSpec], device: str, connection: Connection) -> None:
    """The owner's process. It ends with the connection."""
    try:
        *kept, ranks = export_cache(name, specs, device)
    except ShoalError as error:
        connection.send(error)
        return
    connection.send(ranks)
    connection.poll(None)
    del kept


def wait(pulls: Sequence[Pull]) -> None:
    for pull in pulls:
        while not pull.done():
            time.sleep(0.00002)


def seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def plain_rate(num_bytes: int, source: str, target: str) -> float:
    """GB/s of one copy of one piece, both sides in this process."""
    src = torch.ones(num_bytes, dtype=torch.uint8, device=source)
    dst = torch.zeros(num_bytes, dtype=torch.uint8, device=target)

    def copy() -> None:
        dst.copy_(src)
        if target != "cpu":
            torch.cuda.synchronize(target)

    copy()
    return num_bytes / seconds(copy) / 1e9


def measure(
    name: str, ranks: Sequence[Sequence[ExportAddress]], into: BlockView, num_pulled: int
) -> dict[str, tuple[int, float]]:
    """Bytes and seconds of each case."""
    rng = random.Random(1)
    spec = into.spec
    src_ids, dst_ids = (rng.sample(range(spec.num_blocks), num_pulled) for _ in range(2))
    start = time.perf_counter()
    _, peer = Transports([KINDS[name]]).connect(ranks, [into])
    wait([peer.pull([0], [0], range(spec.num_layers))])
    connecting = time.perf_counter() - start
    print(f"{name}: connected, and one block read, after {connecting * 1e3:.0f} ms", flush=True)
    layers = [range(i, i + 1) for i in range(spec.num_layers)]

    def pull(peer: Peer, parts: Sequence[range]) -> None:
        wait([peer.pull(src_ids, dst_ids, part) for part in parts])

    num_bytes = num_pulled * spec.block_bytes
    found = {
        "all layers at once": (num_bytes, seconds(lambda: pull(peer, [range(spec.num_layers)]))),
        "layer by layer": (num_bytes, seconds(lambda: pull(peer, layers))),
    }
    peer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transports", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--blocks", type=int, help="default: 64 on a CPU, 512 on GPUs")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    owner_device = f"cuda:{torch.cuda.device_count() - 1}" if on_gpu else "cpu"
    reader_device = "cuda:0" if on_gpu else "cpu"
    num_blocks = arguments.blocks or (512 if on_gpu else 64)
    whole = replace(QWEN3_8B, num_blocks=num_blocks)
    plain = plain_rate(whole.num_bytes * 3 // 4, owner_device, reader_device)
    print(f"one copy from {owner_device} to {reader_device}: {plain:.1f} GB/s", flush=True)
    rows: list[dict[str, Any]] = [dict(transport="plain", case="one copy", gb_per_s=round(plain, 2))]
    spawn = multiprocessing.get_context("spawn")
    for name in arguments.transports:
        for src_tp, dst_tp in SIZES:
            specs = [replace(whole, tp_size=src_tp, tp_rank=rank) for rank in range(src_tp)]
            into = new_cache(replace(whole, tp_size=dst_tp), reader_device)
            try:
                if name == "in_process":
                    *kept, ranks = export_cache(name, specs, owner_device)
                else:
                    kept, theirs = spawn.Pipe()
                    owner = spawn.Process(target=own, args=(name, specs, owner_device, theirs), daemon=True)
                    owner.start()
                    ranks = kept.recv()
                    if isinstance(ranks, ShoalError):
                        raise ranks
                found = measure(name, ranks, into, num_blocks * 3 // 4)
            except ShoalError as error:
                print(f"{name}: {error}", flush=True)
                break
            finally:
                if name != "in_process":
                    owner.kill()
            for case, (num_bytes, took) in found.items():
                rate = num_bytes / took / 1e9
                print(
                    f"{name:14s} tp {src_tp} to {dst_tp}, {case:20s} {rate:8.2f} GB/s {rate / plain:6.1%}",
                    flush=True,
                )
                rows.append(
                    dict(
                        transport=name,
                        case=f"tp {src_tp} to {dst_tp}, {case}",
                        gb_per_s=round(rate, 2),
                        of_plain=round(rate / plain, 4),
                    )
                )
            del kept
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
