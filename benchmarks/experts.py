"""The mixture of experts of known models, on one GPU: microseconds of a layer's experts with router and sum,
the share of a copy's bandwidth with which the weights of the experts that are hit are read, and TFLOP/s.

    python benchmarks/experts.py [--sweep] [--shapes qwen3,gpt-oss] [--formats bf16,mxfp4] [--tokens 1,64]

--sweep adds the fastest tiles that it finds for each of the two matmuls, for the rules in dispatch.py's
`expert_tiles`. Runs in CUDA graphs, over as many layers as keep the L2 cache cold where a step would find it
so.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from typing import NamedTuple

import torch
from kernels import BF16, COLD_BYTES, DEVICE, microseconds_of
from matmul import copy_bandwidth

from shoal.kernels.matmul import dispatch, gpu_fp8, gpu_weight, mxfp4_experts
from shoal.kernels.matmul.dispatch import ExpertTiles, RowTiles
from shoal.kernels.matmul.tile_matmul import LISTED, SLOTS, RowMap, tile_matmul
from shoal.kernels.moe import moe, reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.moe.packed_experts import expert_matrix
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kinds.experts import Activation, Router


class Model(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    size: int
    activation: Activation = Activation()
    bias: bool = False


MODELS = {
    "qwen3": Model(128, 8, 2048, 768),  # Qwen3-30B-A3B
    "gpt-oss": Model(32, 4, 2880, 2880, Activation("clamped_swiglu", 1.702, 7.0), True),  # gpt-oss-20b
    "gemma4": Model(128, 8, 2816, 704, Activation("gelu_tanh")),  # Gemma-4-26B-A4B
    "glm": Model(64, 4, 2048, 1536),  # GLM-4.7-Flash
    "qwen3.6": Model(256, 8, 2048, 512),  # Qwen3.6-35B-A3B
}
BITS = {"bf16": 16.0, "fp8": 8.0, "fp8-128": 8.25, "int4": 4.125, "mxfp4": 4.5}
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)


def random_weight(kind: str, experts: int, outs: int, inputs: int, each: int = 1):
    """Weights of one of the two matmuls. `each`: how many matrices of an expert they are."""
    if kind == "bf16":
        return torch.randn(experts, outs, inputs, device=DEVICE, dtype=BF16) / inputs**0.5
    shape = (experts * outs, inputs)
    if kind.startswith("fp8"):
        group = 128 if kind == "fp8-128" else inputs
        data = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
        scales = torch.full((shape[0], -(-inputs // group)), inputs**-0.5, device=DEVICE)
        return gpu_fp8.pack([Fp8Tensor(shape, data, scales, group)], None, DEVICE, BF16)
    quants = torch.randint(0, 256, (shape[0], inputs // 2), dtype=torch.uint8, device=DEVICE)
    if kind == "mxfp4":
        scales = torch.full((shape[0], inputs // 32), 120, dtype=torch.uint8, device=DEVICE)
        whole = Mxfp4Tensor(shape, quants, scales)
        parts = [whole.rows(i, i + outs // each) for i in range(0, shape[0], outs // each)]
        if mxfp4_experts.has_kernels(parts, each, DEVICE, BF16):
            return mxfp4_experts.pack(parts, None, each, DEVICE)
        return gpu_weight.pack([whole], None, DEVICE, BF16)
    scales = torch.full((shape[0], inputs // 128), 0.2 / inputs**0.5, device=DEVICE)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    return gpu_weight.pack([Int4Tensor(shape, quants, scales, zeros)], None, DEVICE, BF16)


def layer(model: Model, kind: str) -> ExpertWeights:
    experts, _, hidden, size, _, bias = model
    return ExpertWeights(
        random_weight(kind, experts, 2 * size, hidden, 2),
        random_weight(kind, experts, hidden, size),
        torch.randn(experts, 2 * size, device=DEVICE).to(BF16) if bias else None,
        torch.randn(experts, hidden, device=DEVICE).to(BF16) if bias else None,
    )


def candidates(kind: str, inputs: int, block_rows: int, gated: bool) -> list[RowTiles]:
    """Tiles that fit into registers and shared memory, with inputs that are whole rounds."""
    found = []
    for outs, columns, stages, warps in itertools.product(
        (32, 64, 128), (64, 128, 192, 256), (2, 3, 4, 5), (4, 8)
    ):
        sums = outs * block_rows * (1 + gated) // (32 * warps)
        itemsize = BITS[kind] / 8
        staged = (outs * (1 + gated) * itemsize + block_rows * 2) * columns * (stages - 1)
        if kind in ("int4", "mxfp4") and warps != outs // 16:
            continue  # A thread reads the weights that it multiplies.
        if block_rows > 64 and (columns > 128 or outs < 64):
            continue
        if inputs % columns == 0 and sums <= 128 and staged <= 220 << 10 and outs >= 16 * (warps // 2):
            found.append(RowTiles(block_rows, outs, columns, warps, stages))
    return found


def compile_tiles(tiles: RowTiles, model: Model, kind: str, gated: bool, slots: bool) -> None:
    """Compiles the kernel of some tiles, which then lies on disk, by a launch with few experts."""
    rows, outs, inputs = model.top_k, *((model.size, model.hidden) if gated else (model.hidden, model.size))
    weight = expert_matrix(random_weight(kind, 2, outs * (1 + gated), inputs))
    bias = torch.zeros(2, outs * (1 + gated), device=DEVICE, dtype=BF16) if model.bias else None
    x, out = (
        torch.zeros(rows, inputs, device=DEVICE, dtype=BF16),
        torch.zeros(rows, outs, device=DEVICE, dtype=BF16),
    )
    numbers = torch.zeros(rows, 3, dtype=torch.int32, device=DEVICE)
    shares = torch.zeros(rows, device=DEVICE) if slots and not gated else None
    blocks = 1 if shares is not None else rows
    row_map = (
        RowMap(SLOTS, numbers, blocks, rows, 2, None, shares)
        if slots
        else RowMap(LISTED, numbers, 1, rows, 2, numbers)
    )
    try:
        tile_matmul(
            tiles, x, weight, bias, out, model.activation if gated else None, shares is not None, row_map
        )
    except Exception:  # noqa: BLE001 -- tiles that do not fit; the sweep says so
        pass
    torch.cuda.synchronize()


def sweep(
    pool: ProcessPoolExecutor,
    run: Callable[[ExpertTiles | None, int], object],
    tiles: ExpertTiles,
    model: Model,
    kind: str,
    copies: int,
) -> None:
    """Prints the fastest tiles of each number of rows. The two matmuls get theirs one after the other."""
    block_rows = tiles.gate_up.rows
    for rows in (16,) if block_rows == 16 else (block_rows, block_rows * 2):
        first, second = candidates(kind, model.hidden, rows, True), candidates(kind, model.size, rows, False)
        if tiles.slots:  # Few slots have their inputs split as the rule splits them, and otherwise.
            first = [replace(one, splits=n) for one in first for n in {1, tiles.gate_up.splits, 5}]
            second = [replace(one, splits=n) for one in second for n in {1, tiles.down.splits, 5}]
        if not first or not second:
            continue
        compiled = [pool.submit(compile_tiles, one, model, kind, True, tiles.slots) for one in first]
        compiled += [pool.submit(compile_tiles, one, model, kind, False, tiles.slots) for one in second]
        for done in compiled:
            done.result()

        def timed(pairs: list[tuple[RowTiles, RowTiles]]) -> list[tuple[float, tuple[RowTiles, RowTiles]]]:
            found = []
            for pair in pairs:
                try:
                    us = microseconds_of(partial(run, ExpertTiles(*pair, tiles.slots)), copies)
                except Exception as error:  # noqa: BLE001 -- tiles that do not fit
                    print("   ", pair, type(error).__name__)
                    continue
                found.append((us, pair))
            return sorted(found, key=lambda pair: pair[0])

        down = next((t for t in second if t.columns == 64 and t.outs == 64), second[0])
        by_first = timed([(cut, down) for cut in first])
        gate_up = by_first[0][1][0]
        by_second = timed([(gate_up, cut) for cut in second])
        for us, pair in by_first[:3]:
            print(f"    {us:8.1f} us  gate-up {astuple(pair[0])}")
        for us, pair in by_second[:3]:
            print(f"    {us:8.1f} us  down {astuple(pair[1])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--formats", default=",".join(BITS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    print(f"{torch.cuda.get_device_name()}, a copy {bandwidth / 1e6:.2f} TB/s")
    for name, kind in itertools.product(arguments.shapes.split(","), arguments.formats.split(",")):
        model = MODELS[name]
        if kind in ("int4", "fp8-128") and (model.hidden % 128 or model.size % 128):
            continue
        experts, top_k, hidden, size, activation, _ = model
        rule = Router(top_k, True)
        expert_bytes = 3 * hidden * size * BITS[kind] / 8
        copies = max(1, min(4, int(COLD_BYTES / (expert_bytes * top_k))))
        layers = [layer(model, kind) for _ in range(copies)]
        for tokens in map(int, arguments.tokens.split(",")):
            x = torch.randn(tokens, hidden, device=DEVICE).to(BF16)
            routers = [torch.randn(tokens, experts, device=DEVICE).to(BF16) for _ in range(copies)]
            rest = activation, torch.randn_like(x)
            hit = sum(len(reference.route(r, rule)[1].unique()) for r in routers) / copies

            def run(
                tiles: ExpertTiles | None, i: int, x=x, routers=routers, layers=layers, rule=rule, rest=rest
            ) -> object:
                given = x, routers[i], rule, layers[i], *rest
                return moe.moe(*given) if tiles is None else moe.moe_with(tiles, *given)

            us = microseconds_of(partial(run, None), copies)
            share, flops = hit * expert_bytes / us / bandwidth, tokens * top_k * 6 * hidden * size / us / 1e6
            print(
                f"{name:8} {kind:8} {tokens:5} tokens {us:8.1f} us  {share:4.0%} of a copy"
                f"  {flops:4.0f} TFLOP/s",
                flush=True,
            )
            if arguments.sweep:
                formats = (
                    moe._format(expert_matrix(layers[0].w13)),
                    moe._format(expert_matrix(layers[0].w2)),
                )
                tiles = dispatch.choose_expert_tiles(
                    tokens * top_k, experts, (hidden, size), formats, BF16, dispatch.gpu_of(DEVICE)
                )
                sweep(pool, run, tiles, model, kind, copies)


if __name__ == "__main__":
    main()
