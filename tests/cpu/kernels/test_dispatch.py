"""The choice of a matmul kernel: the table of the H200, and what other GPUs make of it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import (
    GPU,
    MEASURED,
    After,
    Before,
    ElementwiseTiles,
    ExpertFormat,
    HopperTiles,
    Kernel,
    Limits,
    Matmul,
    RowTiles,
    Shape,
    choose,
    choose_expert_tiles,
    derived_limits,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H200 = GPU(132, True, MEASURED["NVIDIA H200"])
NOTHING, NORM, SUM_AND_NORM = Before
PLAIN, GATED, ADD = After
CUBLAS, NO_ROWS = Matmul(Kernel.CUBLAS), Matmul(Kernel.NOTHING)
RING, RING_WITH_NORM = Matmul(Kernel.HOPPER_ROW), Matmul(Kernel.HOPPER_ROW, norms=True)
MANY_GATED = Matmul(Kernel.HOPPER_GATED)


def elementwise(*tiles: int, norms: bool = False) -> Matmul:
    return Matmul(Kernel.ELEMENTWISE, ElementwiseTiles(*tiles), norms=norms)


def tensor_cores(*tiles: int) -> Matmul:
    return Matmul(Kernel.TILES, RowTiles(*tiles))


def hopper(*tiles: int) -> Matmul:
    return Matmul(Kernel.HOPPER, HopperTiles(*tiles))


# outs, inputs, before, after; then what multiplies how many rows. qwen3-0.6b's shapes come first, then 8b's.
H200_TABLE = [
    ((4096, 1024, SUM_AND_NORM, PLAIN), {1: elementwise(4, 1024, 4, norms=True), 2: hopper(8, 64)}),
    ((4096, 1024, NORM, PLAIN), {1: elementwise(4, 1024, 4, norms=True), 33: hopper(64, 32), 257: CUBLAS}),
    ((1024, 2048, NOTHING, ADD), {0: NO_ROWS, 1: elementwise(2, 2048, 8), 256: hopper(64, 32)}),
    (
        (3072, 1024, NORM, GATED),
        {1: elementwise(8, 512, 4, norms=True), 64: hopper(64, 32), 4096: MANY_GATED},
    ),
    ((1024, 3072, NOTHING, ADD), {1: elementwise(4, 1024, 8), 8: hopper(8, 64, 3), 4096: CUBLAS}),
    (
        (151936, 1024, NOTHING, PLAIN),
        {1: elementwise(8, 512, 4), 4: tensor_cores(16, 64, 128, 4, 5), 64: CUBLAS},
    ),
    # two programs an SM
    (
        (5120, 768, NOTHING, PLAIN),
        {129: hopper(64, 128), 193: hopper(64, 128, 1, 64, 2), 256: hopper(64, 128, 1, 64, 2), 257: CUBLAS},
    ),
    ((6144, 4096, NORM, PLAIN), {1: RING_WITH_NORM, 2: hopper(8, 64), 128: hopper(128, 64, 1, 64)}),
    ((6144, 4096, SUM_AND_NORM, PLAIN), {1: RING, 129: CUBLAS}),
    ((4096, 2048, SUM_AND_NORM, PLAIN), {1: elementwise(2, 2048, 4, norms=True)}),
    ((12288, 4096, NORM, GATED), {1: RING_WITH_NORM, 16: hopper(16, 128, 1, 64), 4095: CUBLAS}),
    ((4096, 12288, NOTHING, ADD), {1: RING, 300: Matmul(Kernel.CUBLAS, adds=False)}),
    ((1536, 4096, NOTHING, GATED), {1: elementwise(1, 4096, 4), 8: CUBLAS}),  # one of 8 ranks'
    ((2048, 32784, NOTHING, PLAIN), {1: elementwise(2, 1024, 4)}),
    ((2048, 4104, NOTHING, PLAIN), {1: elementwise(2, 1024, 4)}),
    (
        (100, 500, NOTHING, PLAIN),
        {2: elementwise(4, 256, 1), 16: tensor_cores(16, 64, 128, 4, 5), 17: CUBLAS},
    ),
]


@pytest.mark.parametrize(("shape", "expected"), H200_TABLE, ids=lambda value: str(value)[:60])
def test_choices_on_an_h200(shape, expected):
    found = {rows: choose(Shape(*shape), rows, BF16, H200) for rows in expected}
    assert found == expected
    assert found == {rows: choose(Shape(*shape), rows, FP16, H200) for rows in expected}


@pytest.mark.parametrize("after", After)
def test_no_rows_launch_nothing_in_any_format(after):
    for gpu in (GPU(), H200):
        for dtype in (BF16, FP32, torch.float8_e4m3fn):
            assert choose(Shape(4096, 4096, NORM, after), 0, dtype, gpu) == NO_ROWS
        for bits in (4, 8):
            assert choose(Shape(4096, 4096, after=after, bits=bits, group=128), 0, BF16, gpu) == NO_ROWS


def test_float32_is_cublass_and_its_norm_is_apart():
    for rows in (1, 8, 5000):
        for after in After:
            chosen = choose(Shape(4096, 4096, NORM, after), rows, FP32, H200)
            assert chosen == CUBLAS


def test_a_bias_keeps_cublas_from_adding_and_gate_and_up_of_many_rows_from_hoppers_kernel():
    assert not choose(Shape(4096, 4096, after=ADD, bias=True), 1000, BF16, H200).adds
    assert choose(Shape(4096, 4096, after=ADD), 1000, BF16, H200).adds
    assert choose(Shape(3072, 1024, after=GATED, bias=True), 5000, BF16, H200).kernel is Kernel.CUBLAS


@pytest.mark.parametrize(("name", "sms"), [("A100", 108), ("L40S", 142), ("RTX 4090", 128), ("T4", 40)])
def test_other_gpus_have_no_kernel_of_hoppers_and_limits_of_their_own_size(name, sms):
    gpu = GPU(sms, False, derived_limits(sms))
    kernels = Kernel.NOTHING, Kernel.ELEMENTWISE, Kernel.TILES, Kernel.CUBLAS
    for shape, expected in H200_TABLE:
        for rows in expected:
            assert choose(Shape(*shape), rows, BF16, gpu).kernel in kernels
    # A wave is a wave on each GPU: as many programs an SM.
    edge = gpu.limits.many_weight_rows
    assert edge // sms == H200.limits.many_weight_rows // 132
    assert choose(Shape(edge, 4096), 32, BF16, gpu).kernel is Kernel.TILES
    assert choose(Shape(edge - 1, 4096), 32, BF16, gpu).kernel is Kernel.CUBLAS


def test_limits_derived_for_the_reference_are_its_own_but_for_what_takes_memory():
    assert MEASURED["NVIDIA H200"] == Limits()
    assert derived_limits(132) == replace(Limits(), widened_expert_rows=dispatch.NEVER)


def test_a_gpu_is_looked_at_once_and_one_that_is_measured_has_its_own_limits(monkeypatch):
    class Properties:
        name, multi_processor_count = "Some GPU", 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(dispatch, "has_compiler", lambda: False)
    device = torch.device("cuda", 7)
    try:
        assert dispatch.gpu_of(device) == GPU(20, False, derived_limits(20), compiles=False)
        dispatch.gpu_of.cache_clear()
        monkeypatch.setitem(MEASURED, "Some GPU", Limits(normed_inputs=5))
        assert dispatch.gpu_of(device).limits.normed_inputs == 5
        Properties.multi_processor_count = 21
        assert dispatch.gpu_of(device).sms == 20
    finally:
        dispatch.gpu_of.cache_clear()


IN_16_BITS, INT4, IN_FP8 = ExpertFormat(), ExpertFormat(4, 128), ExpertFormat(8, 128, is_fp8=True)


@pytest.mark.parametrize(
    ("slots", "of", "dtype", "rows"),
    [
        (8, IN_16_BITS, BF16, 16),
        (64, IN_16_BITS, BF16, 16),
        (8 * 128, IN_16_BITS, BF16, 16),
        (8 * 128 + 1, IN_16_BITS, BF16, 32),
        (16 * 128, IN_FP8, BF16, 16),
        (20 * 128, IN_16_BITS, BF16, 32),
        (20 * 128 + 1, IN_16_BITS, BF16, 64),
        (65 * 128, IN_16_BITS, FP16, 128),
        (65 * 128, INT4, BF16, 128),
        (65 * 128, IN_FP8, BF16, 64),
        (800 * 32, IN_16_BITS, FP32, 32),
    ],
)
def test_experts_tiles_grow_with_their_rows(slots, of, dtype, rows):
    tiles = choose_expert_tiles(slots, 128, (2048, 768), (of, of), dtype, H200)
    assert tiles.gate_up.rows == tiles.down.rows == rows
    assert tiles.slots == (slots == 8)


@pytest.mark.parametrize("inputs", [704, 768, 1536, 2048, 2816, 2880])
@pytest.mark.parametrize("gated", [False, True])
def test_inputs_of_known_experts_are_whole_rounds(inputs, gated):
    for rows in (16, 64, 128):
        for of in (IN_16_BITS, INT4):
            tiles = dispatch.expert_tiles(rows, inputs, gated, of, BF16)
            assert inputs % tiles.columns == 0 or (of is INT4 and inputs == 704)


def test_few_slots_of_packed_experts_are_split_until_the_sms_are_busy():
    tiles = choose_expert_tiles(4, 32, (2880, 2880), (INT4, INT4), BF16, GPU())
    assert tiles.slots and tiles.gate_up.splits > 1 and tiles.down.splits > 1
    plain = choose_expert_tiles(4, 32, (2880, 2880), (IN_16_BITS, IN_16_BITS), BF16, GPU())
    assert plain.gate_up.splits == plain.down.splits == 1


def test_the_benchmark_finds_the_limits_of_a_gpu_from_its_times():
    """A made-up GPU, on which cuBLAS is slow below 9,000 inputs, the ring at once, and nothing else matters."""
    path = Path(__file__).parents[3] / "benchmarks/matmul.py"
    spec = importlib.util.spec_from_file_location("benchmark_matmuls", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)

    def measure(case, chosen: Matmul, limits: Limits) -> float:
        slow = chosen.kernel is Kernel.CUBLAS and case.shape.inputs < 9000
        return 1.0 + slow + (chosen.kernel is Kernel.HOPPER_ROW)

    gpu = GPU(100, True, derived_limits(100))
    shapes = [shape for shape in benchmark.shapes() if shape.inputs % 16 == 0]
    limits = benchmark.fit(
        gpu, [benchmark.Case(shape, rows) for shape in shapes for rows in (1, 16)], measure
    )
    chosen = [choose(shape, 1, BF16, gpu._replace(limits=limits)) for shape in shapes]
    assert all(matmul.kernel is not Kernel.HOPPER_ROW for matmul in chosen)
    assert limits.prefetched_warps == gpu.limits.prefetched_warps  # no time depends on it
