"""The ops beside attention, on one GPU: microseconds, TB/s, and the share of what a copy reaches on an H200.

    python benchmarks/kernels.py [--quick] [linear] [norm] [silu] [rope] [sample] [batch] [launch]

For each case the default, and what other cuts reach (--quick leaves them out). Runs in CUDA graphs, as the
engine's decode steps do; over as many copies of the data as keep the L2 cache cold where a step would find it
so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from shoal.kernels import activation, norm, rope, triton_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.matmul import dispatch, hopper_linear
from shoal.kernels.matmul.elementwise import elementwise_matmul
from shoal.kernels.matmul.tile_matmul import tile_linear
from shoal.kernels.sampling import sample
from shoal.kernels.state import FIELDS, Field, StateLayout

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
COPY_TB = 4.28  # read and write, H200
COLD_BYTES = 300 << 20  # six times an H200's L2
LAUNCHES = 24  # a graph


def microseconds(run: Callable[[], object]) -> float:
    return microseconds_of(lambda _: run(), 1)


def microseconds_of(run: Callable[[int], object], copies: int) -> float:
    """The time of one launch `run(copy)`, in a graph of many; the best of five replays."""
    run(0)
    torch.cuda.synchronize()
    launches = max(LAUNCHES, copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(i % copies)
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / (3 * launches))
    return best


def show(
    op: str, shape: str, us: float, num_bytes: float, others: list[tuple[float, str]] | None = None
) -> None:
    rate = num_bytes / us / 1e6
    print(f"{op:14s} {shape:34s} {us:9.2f} us {rate:6.2f} TB/s {rate / COPY_TB:5.0%}", flush=True)
    for other_us, cut in sorted(others or [])[:4]:
        print(f"{'':49s} {other_us:9.2f} us  {cut}", flush=True)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


PRODUCTS = (
    (4096, 1024, False),
    (1024, 2048, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (151936, 1024, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (24576, 4096, True),
    (4096, 12288, False),
    (151936, 4096, False),
)
ELEMENTWISE_TILES = [
    dispatch.ElementwiseTiles(*cut)
    for cut in (
        (4, 512, 4),
        (8, 512, 4),
        (4, 512, 2),
        (2, 512, 2),
        (4, 256, 1),
        (1, 1024, 4),
        (2, 1024, 4),
        (4, 1024, 4),
        (1, 2048, 4),
        (2, 2048, 4),
        (2, 2048, 8),
    )
]
# outputs, inputs, warps, stages; then splits
TENSOR_CORE_TILES = (
    (16, 128, 2, 6),
    (32, 128, 4, 4),
    (64, 64, 4, 4),
    (64, 128, 4, 3),
    (64, 128, 4, 5),
    (64, 128, 4, 4, 2),
    (64, 128, 4, 4, 4),
    (128, 128, 8, 3),
)


HOPPER_TILES = [
    dispatch.HopperTiles(*cut)
    for cut in (
        (8, 64),
        (16, 64),
        (32, 64),
        (32, 64, 2),
        (32, 64, 3),
        (64, 16, 2),
        (64, 32),
        (64, 32, 2),
        (64, 64),
        (64, 128, 1, 64),
        (128, 64, 1, 64),
    )
]


def bench_linear(sweep: bool) -> None:
    """qwen3-0.6b's and 8b's matmuls (weight rows x inputs), gate and up with their activation, beside
    cuBLAS."""
    for outs, columns, gated in PRODUCTS:
        num_bytes = outs * columns * 2
        weights = [randn(outs, columns) for _ in range(max(1, min(60, COLD_BYTES // num_bytes)))]
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x = randn(rows, columns)
            ops, name = (triton_ops.linear_gated, "linear_gated") if gated else (triton_ops.linear, "linear")
            others = [(microseconds_of(partial(_cublas, x, weights, gated), len(weights)), "cuBLAS")]
            tried: list[dispatch.ElementwiseTiles | dispatch.RowTiles] = [
                tiles
                for tiles in ELEMENTWISE_TILES
                if rows * (1 + gated) * tiles.outs * tiles.columns <= 192 * 32 * tiles.num_warps
            ]
            if 1 < rows <= 64:
                tall = max(16, 1 << (rows - 1).bit_length())
                tried += [dispatch.RowTiles(tall, *cut) for cut in TENSOR_CORE_TILES]
            for tiles in tried if sweep else ():
                run = partial(_matmul, tiles, x, weights, gated)
                others.append((microseconds_of(run, len(weights)), f"{astuple(tiles)}"))
            for cut in HOPPER_TILES if sweep and rows > 1 and dispatch.gpu_of(x.device).hopper else ():
                if (
                    (cut.splits == 1 or not gated)
                    and (rows <= cut.rows or cut.rows >= 64)
                    and cut.stages(columns, gated) > 1
                ):
                    hopper = partial(_hopper, cut, x, weights, gated)
                    others.append((microseconds_of(hopper, len(weights)), f"{astuple(cut)} on Hopper"))
            us = microseconds_of(
                lambda i, op=ops, x=x, weights=weights: op(x, weights[i], None), len(weights)
            )
            show(name, f"{rows} rows, {outs} x {columns}", us, num_bytes, others)
            if outs <= columns:  # such matmuls end half a layer
                add = partial(_linear_add, x, weights, randn(rows, outs))
                show(
                    "linear_add",
                    f"{rows} rows, {outs} x {columns}",
                    microseconds_of(add, len(weights)),
                    num_bytes,
                )


def _linear_add(x: torch.Tensor, weights: list[torch.Tensor], residual: torch.Tensor, i: int) -> None:
    left = triton_ops.linear_add(x, weights[i], None, residual)
    if left is not None:  # to the next norm, whose reading of it counts here
        residual += left


def _cublas(x: torch.Tensor, weights: list[torch.Tensor], gated: bool, i: int) -> torch.Tensor:
    y = F.linear(x, weights[i])
    return triton_ops.gate_mul(y) if gated else y


def _matmul(
    tiles: dispatch.ElementwiseTiles | dispatch.RowTiles,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    gated: bool,
    i: int,
) -> torch.Tensor:
    if isinstance(tiles, dispatch.RowTiles):
        return tile_linear(tiles, x, weights[i], None, gated)
    return elementwise_matmul(tiles, x, weights[i], None, gated)


def _hopper(
    tiles: dispatch.HopperTiles, x: torch.Tensor, weights: list[torch.Tensor], gated: bool, i: int
) -> torch.Tensor:
    return hopper_linear.hopper_matmul(tiles, x, weights[i], None, gated)


def bench_norm(sweep: bool) -> None:
    for tokens, size in ((1, 1024), (256, 1024), (16384, 1024), (1, 4096), (256, 4096), (16384, 4096)):
        run = partial(triton_ops.add_rms_norm, randn(tokens, size), randn(tokens, size), randn(size), 1e-6)
        others = []
        for elements in (4, 8, 16, 32) if sweep else ():
            with mock.patch.object(norm, "ELEMENTS_PER_THREAD", elements):
                others.append((microseconds(run), f"{elements} elements a thread"))
        show("add_rms_norm", f"{tokens} x {size}", microseconds(run), tokens * size * 2 * 4, others)


def bench_silu(sweep: bool) -> None:
    for tokens, size in ((1, 3072), (256, 3072), (16384, 3072), (256, 12288), (8192, 12288)):
        run = partial(triton_ops.gate_mul, randn(tokens, 2 * size))
        others = []
        for block in (512, 1024, 2048, 4096) if sweep else ():
            with mock.patch.object(activation, "BLOCK", block):
                others.append((microseconds(run), f"blocks of {block}"))
        show("gate_mul", f"{tokens} x {size}", microseconds(run), tokens * size * 2 * 3, others)


def bench_rope(sweep: bool) -> None:
    for tokens, heads, kv_heads in (
        (1, 16, 8),
        (8, 16, 8),
        (64, 16, 8),
        (256, 16, 8),
        (1024, 16, 8),
        (16384, 16, 8),
        (256, 32, 8),
        (16384, 32, 8),
    ):
        prefill = tokens > 256
        # a prefill's tokens are neighbours, a decode's are not
        num_blocks = tokens // 16 if prefill else tokens
        layers = max(1, min(28, COLD_BYTES // (num_blocks * 2 * kv_heads * 16 * 128 * 2)))
        kv = torch.zeros(num_blocks, layers, 2, kv_heads, 16, 128, dtype=BF16, device=DEVICE)
        at = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        tables = torch.randperm(num_blocks, device=DEVICE).int().view(-1, 64 if prefill else 1)
        rows, positions = (at // 1024, at % 1024) if prefill else (at, at % 16)
        qkv, weight, cos_sin = (
            randn(tokens, (heads + 2 * kv_heads) * 128),
            randn(128),
            torch.randn(4096, 128, device=DEVICE),
        )
        store = partial(
            triton_ops.qk_norm_rope_store, qkv, weight, weight, 1e-6, cos_sin, positions, rows, tables
        )
        run = partial(_store_layer, store, [LayerCache(layer) for layer in kv.unbind(1)])
        others = []
        for count in (2, 4, 8, 16, 32) if sweep else ():
            with mock.patch.object(rope, "heads_per_program", return_value=count):
                others.append((microseconds_of(run, layers), f"{count} heads a program"))
        num_bytes = tokens * 128 * 2 * (2 * (heads + kv_heads) + 3 * kv_heads)
        show(
            "qk_norm_rope",
            f"{tokens} tokens, {heads} + {kv_heads} heads",
            microseconds_of(run, layers),
            num_bytes,
            others,
        )


def _store_layer(store: Callable[..., None], caches: list[LayerCache], layer: int) -> None:
    store(caches[layer])


SAMPLING = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.6, 0, 1.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95),
    "top_p 0.95": (1.0, 0, 0.95),
    "top_k 2000": (1.0, 2000, 1.0),
}  # temperature, top_k, top_p


PICKS = (4, 8, 16, 32)  # warps of the second kernel


def bench_sample(sweep: bool) -> None:
    for num_seqs in (1, 8, 64, 256):
        layout = StateLayout(num_seqs, 16)
        table, rows, out = (
            layout.table(zeros(layout.size)),
            torch.arange(num_seqs, dtype=torch.int32, device=DEVICE),
            zeros(num_seqs),
        )
        for scale, kind in ((3.0, "peaked"), (0.5, "flat")):
            run = partial(triton_ops.sample, randn(num_seqs, 151936) * scale, rows, rows, table, out)
            for name, (temperature, top_k, top_p) in SAMPLING.items():
                if kind == "flat" and name in ("greedy", "temperature"):
                    continue
                table[:, Field.TOP_K] = top_k
                table.view(torch.float32)[:, Field.TEMPERATURE], table.view(torch.float32)[:, Field.TOP_P] = (
                    temperature,
                    top_p,
                )
                others = []
                for tiles in (1, 2, 4, 8) if sweep and kind == "peaked" else ():
                    for warps in PICKS:
                        with mock.patch.multiple(
                            sample, tiles_per_program=mock.Mock(return_value=tiles), PICK_WARPS=warps
                        ):
                            others.append((microseconds(run), f"{tiles} tiles a program, {warps} warps pick"))
                show(
                    "sample",
                    f"{num_seqs} x 151936 {kind}, {name}",
                    microseconds(run),
                    num_seqs * 151936 * 2,
                    others,
                )


def bench_batch(sweep: bool) -> None:
    layout = StateLayout(512, 288)
    state = zeros(layout.size)
    rows, out = torch.arange(256, dtype=torch.int32, device=DEVICE), [zeros(256) for _ in range(3)]
    addresses = torch.randperm(layout.size, device=DEVICE)[:256].int()
    show(
        "begin_decode",
        "256 rows",
        microseconds(lambda: triton_ops.begin_decode(rows, layout.table(state), *out)),
        256 * (32 * 2 + 16),
    )
    show(
        "apply_updates",
        "256 values",
        microseconds(lambda: triton_ops.apply_updates(state, addresses, rows)),
        256 * 40,
    )
    ids, weight = torch.randint(0, 151936, (16384,), dtype=torch.int32, device=DEVICE), randn(151936, 1024)
    show("embed", "16384 x 1024", microseconds(lambda: triton_ops.embed(ids, weight)), 16384 * 1024 * 4)


def bench_launch(sweep: bool) -> None:
    """Host time of a call, which eager steps wait for."""
    x, weight, qkv, cos_sin = randn(8, 1024), randn(1024), randn(8, 4096), torch.randn(64, 128, device=DEVICE)
    kv, tables = torch.zeros(8, 2, 8, 16, 128, dtype=BF16, device=DEVICE), zeros(8, FIELDS)
    at = torch.arange(8, dtype=torch.int32, device=DEVICE)
    head_weight = randn(128)
    calls: dict[str, Callable[[], object]] = {
        "add_rms_norm": lambda: triton_ops.add_rms_norm(x, x, weight, 1e-6),
        "gate_mul": lambda: triton_ops.gate_mul(qkv),
        "qk_norm_rope": lambda: triton_ops.qk_norm_rope_store(
            qkv, head_weight, head_weight, 1e-6, cos_sin, at, at, tables, LayerCache(kv)
        ),
    }
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        print(f"{name:14s} {(time.perf_counter() - start) * 2000:.1f} us of host time a call", flush=True)
        torch.cuda.synchronize()


def main() -> None:
    parts = {
        "linear": bench_linear,
        "norm": bench_norm,
        "silu": bench_silu,
        "rope": bench_rope,
        "sample": bench_sample,
        "batch": bench_batch,
        "launch": bench_launch,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--quick", action="store_true", help="the defaults only")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"unknown parts {sorted(unknown)}; choose of {', '.join(parts)}")
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in arguments.parts or parts:
        parts[part](not arguments.quick)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
