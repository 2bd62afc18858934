"""Retunes the matmuls for the GPU at hand: measures the limits by which `shoal.kernels.matmul.dispatch`
chooses kernels and tiles, and prints their line, to be pasted into `MEASURED` there. It is the one command
for another GPU:

    python benchmarks/matmul.py [--quick]

Each limit in turn takes the value with which all matmuls together take the least time, in bf16, fp8 and int4,
as measured in CUDA graphs over fresh weights; twice around, as limits depend on each other a little. Tiles of
experts, and the rows from which Hopper has a kernel of its own for them, are what experts.py measures.

For work on the rules themselves:

    python benchmarks/matmul.py --fp8 | --packed [--sweep] [--matmuls qkv,down] [--rows 1,64]

--fp8 prints a table of matmuls with fp8 weights: microseconds, the share of the bandwidth of a copy with
which the weight is read (up to 64 rows) or TFLOP/s (more), and how many times faster than our own bf16 they
are. Beside them stands torch's matmul of fp8 rows with scales. --packed prints such a table of matmuls with
weights of 4 and 8 bits (packed_linear.py). --sweep adds the fastest tiles that it finds, for the rules in
`_choose_fp8` and `choose_packed_tiles`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from shoal.kernels.matmul import dispatch, fp8_linear, launch, linear
from shoal.kernels.matmul.dispatch import (
    GPU,
    After,
    Before,
    ElementwiseTiles,
    Kernel,
    Limits,
    Matmul,
    RowTiles,
    Shape,
    choose,
    gpu_of,
)

# Tried for each limit, times its value so far.
FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
ROUNDS = 2
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SIZES = ((576, 1536), (1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288), (5120, 25600))
GROUP = 128  # inputs of packed weights that share a scale


class Case(NamedTuple):
    """A matmul of some rows. `dtype`: of the weight; of the rows, too, if the weight is packed."""

    shape: Shape
    rows: int
    dtype: torch.dtype = torch.bfloat16


Measure = Callable[[Case, Matmul, Limits], float]  # microseconds


def shapes() -> list[Shape]:
    """The four matmuls of a layer, and an output head, of models of different sizes."""
    found = []
    for hidden, inner in SIZES:
        found += [
            Shape(3 * hidden // 2, hidden, Before.NORM),
            Shape(hidden, hidden, after=After.ADD),
            Shape(inner, hidden, Before.NORM, After.SILU_MUL),
            Shape(hidden, inner, after=After.ADD),
        ]
    return [*found, Shape(32768, 2048), Shape(151936, 1024)]


def cases(quick: bool) -> list[Case]:
    """All shapes in bf16. In fewer bits, layers of three sizes, by rows about the limits."""
    every, of_rows = shapes(), ROWS
    layers = [shape for shape in every if shape.after is not After.NOTHING or shape.before is Before.NORM]
    layers = [shape for shape in layers if {shape.outs, shape.inputs} & {1024, 2048, 4096}]
    if quick:
        every, of_rows, layers = every[4:8], ROWS[:6], layers[:4]
    found = [Case(shape, rows) for shape in every for rows in of_rows]
    for rows in (2, 16, 32, 64) if quick else (2, 8, 16, 32, 64, 128, 256, 512):
        for shape in layers:
            if rows <= 64:
                found.append(Case(shape, rows, torch.float8_e4m3fn))
            found.append(Case(shape._replace(bits=4, group=GROUP), rows))
    return found


def fit(gpu: GPU, cases: Iterable[Case], measure: Measure) -> Limits:
    """The limits with which the cases take the least time. A tie keeps the value that was there."""
    cases, limits = list(cases), gpu.limits

    def total(limits: Limits) -> float:
        on = gpu._replace(limits=limits)
        return sum(measure(case, choose(*case, on), limits) for case in cases)

    for _ in range(ROUNDS):
        for field in fields(Limits):
            value = getattr(limits, field.name)
            tried = [replace(limits, **{field.name: max(1, int(value * factor))}) for factor in FACTORS]
            best = min(tried, key=total)
            if total(best) < total(limits):
                limits = best
            print(f"{field.name}: {getattr(limits, field.name)}", file=sys.stderr, flush=True)
    return limits


@functools.lru_cache(maxsize=1)
def _weights(outs: int, inputs: int, bits: int, dtype: torch.dtype) -> list[Any]:
    """As many weights as keep the L2 cache cold."""
    from kernels import COLD_BYTES, randn

    from shoal.kernels.matmul import gpu_weight

    fp8 = dtype == torch.float8_e4m3fn
    copies = max(1, min(60, COLD_BYTES // (outs * inputs * (8 if fp8 else bits) // 8)))
    if fp8:
        return _fp8_weights([randn(outs, inputs) for _ in range(copies)], "outputs")
    if bits == 16:
        return [randn(outs, inputs) for _ in range(copies)]
    packed = gpu_weight.pack([_int4(outs, inputs, GROUP, 8)], None, torch.device("cuda"), dtype)
    assert isinstance(packed, gpu_weight.GpuWeight)
    return [replace(packed, words=packed.words.clone()) for _ in range(copies)]


@functools.cache
def _microseconds(case: Case, chosen: Matmul, prefetches: bool) -> float:
    from kernels import microseconds_of, randn

    from shoal.kernels.quant.fp8_quantize import quantize

    shape, rows, dtype = case
    weights = _weights(shape.weight_rows, shape.inputs, shape.bits, dtype)
    x, residual, norm = randn(rows, shape.inputs), randn(rows, shape.outs), randn(shape.inputs)
    taken = quantize(x, 0) if chosen.kernel in fp8_linear.ROWS_ARE_FP8 else x
    on = gpu_of(x.device)._replace(limits=Limits(prefetched_warps=1 << 30 if prefetches else 0))

    def run(i: int) -> object:
        if shape.bits < 16 or dtype == torch.float8_e4m3fn:
            return _in_few_bits(weights, taken, residual, shape.after, i)
        if shape.before is Before.NORM:
            gate = "silu" if shape.gated else None
            return linear.add_norm_linear(None, x, norm, 1e-6, weights[i], None, gate)
        return _in_bf16(weights, x, residual, shape.after, i)

    choices = [mock.patch.object(module, "choose", lambda *_: chosen) for module in (launch, fp8_linear)]
    with choices[0], choices[1], mock.patch.object(dispatch, "gpu_of", lambda _: on):
        return microseconds_of(run, len(weights))


def measure(case: Case, chosen: Matmul, limits: Limits) -> float:
    """Measured once for each choice. A limit of warps counts only for matmuls that are cut by them."""
    prefetches = False
    if isinstance(chosen.tiles, ElementwiseTiles) and chosen.kernel is Kernel.ELEMENTWISE:
        warps = -(-case.shape.outs // chosen.tiles.outs) * chosen.tiles.num_warps
        prefetches = warps <= limits.prefetched_warps
    return _microseconds(case, chosen, prefetches)


# Outputs, inputs, what comes before and after: qwen3-8b's layer.
FP8_SHAPES = (
    ("qkv", 6144, 4096, After.NOTHING),
    ("o", 4096, 4096, After.ADD),
    ("gate-up", 12288, 4096, After.SILU_MUL),
    ("down", 4096, 12288, After.ADD),
)
FP8_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 4096, 16384)


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written."""
    from kernels import microseconds

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def _in_bf16(
    weights: list[torch.Tensor], x: torch.Tensor, residual: torch.Tensor, after: After, i: int
) -> None:
    if after is After.SILU_MUL:
        linear.linear_gated(x, weights[i], None)
    elif after is After.NOTHING:
        linear.linear(x, weights[i], None)
    elif (left := linear.linear_add(x, weights[i], None, residual)) is not None:
        residual.add_(left)


def _in_few_bits(weights: list[Any], x: Any, residual: torch.Tensor, after: After, i: int) -> None:
    if after is After.SILU_MUL:
        weights[i].gated(x, None, weights[i].fp8_group(len(x)))
    elif after is After.NOTHING:
        weights[i].linear(x, None)
    else:
        weights[i].add(x, None, residual)


def _by_torch(weights: list[Any], x: Any, out: torch.Tensor, i: int) -> None:
    """The matmul of fp8 rows alone, whatever follows it."""
    fp8_linear._by_torch(x, weights[i].matrix, None, out, False)


def _fp8_weights(plain: list[torch.Tensor], scales: str) -> list[Any]:
    from shoal.kernels.matmul import gpu_fp8
    from shoal.kernels.quant.fp8_tensor import Fp8Tensor

    (outs, inputs), fp8 = plain[0].shape, torch.float8_e4m3fn
    if scales == "outputs":
        tensors = [Fp8Tensor.rounded(weight) for weight in plain]
    else:
        ones = torch.ones(outs, inputs // 128, device="cuda")
        tensors = [Fp8Tensor((outs, inputs), weight.to(fp8), ones, 128) for weight in plain]
    return [gpu_fp8.pack([tensor], None, "cuda", torch.bfloat16) for tensor in tensors]


def fp8_table(names: set[str], all_rows: list[int], sweep: bool) -> None:
    from kernels import COLD_BYTES, microseconds_of, randn

    from shoal.kernels.quant.fp8_quantize import quantize

    bandwidth = copy_bandwidth()
    print(f"a copy: {bandwidth / 1e6:.2f} TB/s\n")
    print("| matmul | rows | scales | us | of a copy | TFLOP/s | times bf16's speed | torch's us | fastest |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, outs, inputs, after in FP8_SHAPES:
        if name not in names:
            continue
        weight_rows = outs * (1 + (after is After.SILU_MUL))
        copies = max(2, COLD_BYTES // (weight_rows * inputs))
        plain = [randn(weight_rows, inputs) for _ in range(copies)]
        by_scales = {scales: _fp8_weights(plain, scales) for scales in ("outputs", "blocks")}
        for rows in all_rows:
            x, residual = randn(rows, inputs), randn(rows, outs)
            base = microseconds_of(partial(_in_bf16, plain, x, residual, after), copies)
            for scales, weights in by_scales.items():
                group, share, flops, torchs, fastest = weights[0].fp8_group(rows), "", "", "", ""
                taken = x if group is None else quantize(x, group)
                us = microseconds_of(partial(_in_few_bits, weights, taken, residual, after), copies)
                if group is None:
                    read = sum(tensor.nbytes for tensor in weights[0].tensors().values())
                    share = f"{read / us / bandwidth:.0%}"
                else:
                    flops = f"{2 * rows * weight_rows * inputs / us / 1e6:.0f}"
                if scales == "outputs":
                    by_torch = partial(_by_torch, weights, quantize(x, 0), x.new_empty(rows, weight_rows))
                    torchs = f"{microseconds_of(by_torch, copies):.1f}"
                if sweep and group is None:
                    fastest = _fastest_fp8(weights, x, Shape(outs, inputs, after=after))
                cells = (name, rows, scales, f"{us:.1f}", share, flops, f"{base / us:.2f}", torchs, fastest)
                print("|", " | ".join(map(str, cells)), "|", flush=True)


def _fastest_fp8(weights: list[Any], x: torch.Tensor, shape: Shape) -> str:
    """Tiles of few rows alone are tried."""
    from shoal.kernels.matmul.elementwise import elementwise_matmul
    from shoal.kernels.matmul.tile_matmul import tile_linear

    rows, out = len(x), x.new_zeros(len(x), shape.outs)
    tall = min(64, max(16, 1 << (rows - 1).bit_length()))
    every: list[ElementwiseTiles | RowTiles] = [
        RowTiles(tall, outs, columns, outs // 16, stages, splits)
        for outs, columns in ((64, 64), (64, 128), (64, 256), (128, 128))
        if columns <= (weights[0].matrix.group or columns)
        for stages in (3, 5)
        for splits in (1, 2, 3, 4, 6, 8)
    ]
    if rows == 1:
        every += [ElementwiseTiles(outs, columns, 4) for outs in (1, 2, 4) for columns in (1024, 2048, 4096)]

    def run(tiles: ElementwiseTiles | RowTiles, i: int) -> object:
        added = out if shape.after is After.ADD else None
        if isinstance(tiles, ElementwiseTiles):
            return elementwise_matmul(tiles, x, weights[i].matrix, None, shape.gated, added)
        return tile_linear(tiles, x, weights[i].matrix, None, shape.gated, added)

    return _fastest(run, every, len(weights))


# Names of what the weights are like; what makes a tensor of them
PACKED_FORMS: dict[str, Callable[[int, int], Any]] = {
    "int4, group 128": lambda outs, inputs: _int4(outs, inputs, 128, 8),
    "int4, group 128, zeros": lambda outs, inputs: _int4(outs, inputs, 128, 7),
    "int4, group 32": lambda outs, inputs: _int4(outs, inputs, 32, 8),
    "mxfp4": lambda outs, inputs: _mxfp4(outs, inputs),
    "Q4_K": lambda outs, inputs: _gguf("Q4_K", outs, inputs),
    "Q8_0": lambda outs, inputs: _gguf("Q8_0", outs, inputs),
    "Q6_K": lambda outs, inputs: _gguf("Q6_K", outs, inputs),
}
PACKED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _int4(outs: int, inputs: int, group: int, zero: int) -> Any:
    from shoal.kernels.quant.int4_tensor import Int4Tensor

    scales = torch.full((outs, inputs // group), 0.01)
    zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
    return Int4Tensor((outs, inputs), _bytes(outs, inputs // 2), scales, zeros)


def _mxfp4(outs: int, inputs: int) -> Any:
    from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

    return Mxfp4Tensor.of(_bytes(outs, inputs // 2), torch.full((outs, inputs // 32), 120, dtype=torch.uint8))


def _gguf(kind: str, outs: int, inputs: int) -> Any:
    """Scales are any numbers, as no speed depends on them, but zeros where they might be none."""
    from shoal.kernels.quant.ggml_types import GROUPS
    from shoal.kernels.quant.gguf_tensor import GGUFTensor

    size, num_bytes = GROUPS[kind]
    return GGUFTensor(kind, (outs, inputs), (_bytes(outs, inputs // size * num_bytes) & 0x33).numpy())


def packed_table(names: set[str], all_rows: list[int], quick: bool, sweep: bool) -> None:
    from kernels import COLD_BYTES, microseconds_of, randn

    from shoal.kernels.matmul import gpu_weight

    bandwidth = copy_bandwidth()
    print(f"a copy: {bandwidth / 1e6:.2f} TB/s\n")
    print("| matmul | weights | rows | us | of a copy | times bf16's speed | fastest tiles |")
    print("|---|---|---|---|---|---|---|")
    forms = dict(list(PACKED_FORMS.items())[:1]) if quick else PACKED_FORMS
    for name, outs, inputs, after in FP8_SHAPES:
        if name not in names:
            continue
        gated = after is After.SILU_MUL
        weight_rows = outs * (1 + gated)
        copies = max(2, 2 * COLD_BYTES // (weight_rows * inputs))
        plain = [randn(weight_rows, inputs) for _ in range(max(2, copies // 4))]
        base = {}
        for rows in all_rows:
            x, residual = randn(rows, inputs), randn(rows, outs)
            base[rows] = microseconds_of(partial(_in_bf16, plain, x, residual, after), len(plain))
        for form, make in forms.items():
            weight = gpu_weight.pack([make(weight_rows, inputs)], None, torch.device("cuda"), torch.bfloat16)
            assert isinstance(weight, gpu_weight.GpuWeight)
            read = sum(tensor.nbytes for tensor in weight.tensors().values())
            weights = [weight] + [
                replace(weight, words=weight.words.clone(), scales=weight.scales.clone())
                for _ in range(copies - 1)
            ]
            for rows in all_rows:
                x, residual = randn(rows, inputs), randn(rows, outs)
                us = microseconds_of(partial(_in_few_bits, weights, x, residual, after), copies)
                best = ""
                if sweep and rows <= 256:
                    best = _fastest_tiles(weights, x, gated)
                share = f"{read / us / bandwidth:.0%}"
                cells = (name, form, rows, f"{us:.1f}", share, f"{base[rows] / us:.2f}", best)
                print("|", " | ".join(map(str, cells)), "|", flush=True)


def _fastest_tiles(weights: list[Any], x: torch.Tensor, gated: bool) -> str:
    from shoal.kernels.matmul.tile_matmul import tile_linear

    rows = min(128, max(16, 1 << (len(x) - 1).bit_length()))
    every = [
        RowTiles(rows, outs, steps * 256 // weights[0].bits, outs // 16, num_stages, splits)
        for outs in ((64,) if gated else (64, 128))
        for splits in (1, 2, 3, 4, 6, 8)
        for steps in (1, 2, 4, 8)
        for num_stages in (3, 4, 6)
    ]

    def run(tiles: RowTiles, i: int) -> object:
        return tile_linear(tiles, x, weights[i], None, gated)

    return _fastest(run, every, len(weights))


def _fastest(run: Callable[[Any, int], object], every: list[Any], copies: int) -> str:
    from kernels import microseconds_of

    found = []
    for tiles in every:
        try:
            found.append((microseconds_of(partial(run, tiles), copies), str(tiles)))
        except RuntimeError:  # It does not fit into shared memory.
            continue
    us, tiles_text = min(found)
    return f"{us:.1f} us with {tiles_text}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few shapes and rows")
    parser.add_argument("--fp8", action="store_true", help="the table of matmuls with fp8 weights")
    parser.add_argument("--packed", action="store_true", help="the table of matmuls with packed weights")
    parser.add_argument("--sweep", action="store_true", help="with --fp8 or --packed: tries other tiles too")
    every_name = ",".join(name for name, *_ in FP8_SHAPES)
    parser.add_argument("--matmuls", default=every_name, help="with --fp8 or --packed")
    parser.add_argument("--rows", help="with --fp8 or --packed: numbers of rows")
    args = parser.parse_args()
    if args.fp8 or args.packed:
        rows = list(FP8_ROWS if args.fp8 else PACKED_ROWS)[:: 3 if args.quick else 1]
        if args.rows:
            rows = [int(n) for n in args.rows.split(",")]
        names = set(args.matmuls.split(","))
        if args.fp8:
            fp8_table(names, rows, args.sweep)
        else:
            packed_table(names, rows, args.quick, args.sweep)
        return
    limits = fit(gpu_of(torch.device("cuda", 0)), cases(args.quick), measure)
    name = torch.cuda.get_device_properties(0).name
    changed = {
        field.name: getattr(limits, field.name)
        for field in fields(Limits)
        if getattr(limits, field.name) != getattr(Limits(), field.name)
    }
    print(f'    "{name}": Limits({", ".join(f"{key}={value}" for key, value in changed.items())}),')


if __name__ == "__main__":
    main()
