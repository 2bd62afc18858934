"""Measures the limits by which `shoal.kernels.products` chooses, on the GPU at hand, and prints its line for
MEASURED.

    python benchmarks/products.py [--quick]

Each limit in turn takes the value with which all products together take the least time, as measured in CUDA
graphs over fresh weights; twice around, as limits depend on each other a little.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from dataclasses import fields, replace

import torch

from shoal.kernels import linear
from shoal.kernels.products import GPU, After, Before, Kernel, Limits, Product, Shape, choose, gpu_of

# Tried for each limit, times its value so far.
FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
ROUNDS = 2
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SIZES = ((576, 1536), (1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288), (5120, 25600))
Measure = Callable[[Shape, int, Product, Limits], float]  # microseconds


def shapes() -> list[Shape]:
    """The four products of a layer, and an output head, of models of different sizes."""
    found = []
    for hidden, inner in SIZES:
        found += [
            Shape(3 * hidden // 2, hidden, Before.NORM),
            Shape(hidden, hidden, after=After.ADD),
            Shape(inner, hidden, Before.NORM, After.SILU_MUL),
            Shape(hidden, inner, after=After.ADD),
        ]
    return [*found, Shape(32768, 2048), Shape(151936, 1024)]


def fit(gpu: GPU, cases: Iterable[tuple[Shape, int]], measure: Measure) -> Limits:
    """The limits with which the cases take the least time. A tie keeps the value that was there."""
    cases, limits = list(cases), gpu.limits

    def total(limits: Limits) -> float:
        on = gpu._replace(limits=limits)
        return sum(
            measure(shape, rows, choose(shape, rows, torch.bfloat16, on), limits) for shape, rows in cases
        )

    for _ in range(ROUNDS):
        for field in fields(Limits):
            value = getattr(limits, field.name)
            tried = [replace(limits, **{field.name: int(value * factor)}) for factor in FACTORS]
            best = min(tried, key=total)
            if total(best) < total(limits):
                limits = best
    return limits


@functools.cache
def _microseconds(shape: Shape, rows: int, chosen: Product, prefetches: bool) -> float:
    from kernels import COLD_BYTES, microseconds_of, randn

    weight_bytes = shape.weight_rows * shape.inputs * 2
    weights = [
        randn(shape.weight_rows, shape.inputs) for _ in range(max(1, min(60, COLD_BYTES // weight_bytes)))
    ]
    x, residual, norm = randn(rows, shape.inputs), randn(rows, shape.outs), randn(shape.inputs)
    limits = Limits(prefetched_warps=1 << 30 if prefetches else 0)
    on = gpu_of(x.device)._replace(limits=limits)

    def run(i: int) -> object:
        if shape.before is Before.NORM:
            return linear.add_norm_linear(None, x, norm, 1e-6, weights[i], None, shape.gated)
        if shape.after is After.ADD:
            left = linear.linear_add(x, weights[i], None, residual)
            return left if left is None else residual.add_(left)
        return linear.linear(x, weights[i], None)

    chooses, looks = linear.choose, linear.products.gpu_of
    linear.choose, linear.products.gpu_of = lambda *_: chosen, lambda _: on  # type: ignore[assignment]
    try:
        return microseconds_of(run, len(weights))
    finally:
        linear.choose, linear.products.gpu_of = chooses, looks


def measure(shape: Shape, rows: int, chosen: Product, limits: Limits) -> float:
    """Measured once for each choice. A limit of warps counts only for products that are cut by them."""
    prefetches = False
    if chosen.kernel is Kernel.TRITON and chosen.tiles is not None and not chosen.tiles.num_stages:
        warps = -(-shape.outs // chosen.tiles.outs) * chosen.tiles.num_warps
        prefetches = warps <= limits.prefetched_warps
    return _microseconds(shape, rows, chosen, prefetches)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few shapes and rows")
    args = parser.parse_args()
    gpu = gpu_of(torch.device("cuda", 0))
    every, rows = shapes(), ROWS
    if args.quick:
        every, rows = every[4:8], ROWS[:6]
    limits = fit(gpu, [(shape, n) for shape in every for n in rows], measure)
    name = torch.cuda.get_device_properties(0).name
    changed = {
        field.name: getattr(limits, field.name)
        for field in fields(Limits)
        if getattr(limits, field.name) != getattr(Limits(), field.name)
    }
    print(f'    "{name}": Limits({", ".join(f"{key}={value}" for key, value in changed.items())}),')


if __name__ == "__main__":
    main()
