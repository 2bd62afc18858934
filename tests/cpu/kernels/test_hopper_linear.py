"""Tile sizes of Hopper's matmuls (test_dispatch.py says which they are), and that they compile for sm_90 without spills.
Gluon has no interpreter: results are compared in tests/gpu/test_linear_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
from triton_compile import SHARED_LIMIT, check_kernels

from shoal.kernels.hopper import MAX_ROWS, empty_matmul_input
from shoal.kernels.matmul import dispatch, hopper_linear, hopper_row, linear
from shoal.kernels.matmul.dispatch import GPU, SHARED_BYTES, choose_hopper_tiles
from shoal.kernels.matmul.hopper_linear import MAX_TILES
from shoal.kernels.matmul.loaders import Fp8Matrix, TiledWeight
from shoal.kernels.matmul.tile_matmul import Weight

H200_SMS = 132
BF16, FP16 = torch.bfloat16, torch.float16
# outs, inputs, gated: qwen3-0.6b
SHAPES = (
    (4096, 1024, False),
    (1024, 2048, False),
    (3072, 1024, True),
    (1024, 3072, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (12288, 4096, True),
    (4096, 12288, False),  # qwen3-8b
    (9728, 2560, True),
    (1000, 1040, False),
    (360, 576, True),  # qwen3-4b; odd ones
    (5120, 768, False),  # queries of glm-4.7-flash
)
LAUNCHES: dict[str, Callable[[], object]] = {}


@pytest.mark.parametrize(("outs", "inputs", "gated"), SHAPES)
@pytest.mark.parametrize("rows", [2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 255, 256])
def test_tiles_cover_the_matmul_and_fit(rows: int, outs: int, inputs: int, gated: bool) -> None:
    tiles = choose_hopper_tiles(rows, outs, inputs, gated, H200_SMS)
    if tiles is None:
        assert rows > 64
        return
    programs = triton.cdiv(rows, tiles.rows) * triton.cdiv(outs, tiles.outs)
    stages, num_tiles = tiles.stages(inputs, gated), tiles.num_tiles(inputs)
    assert programs * tiles.splits <= H200_SMS * tiles.an_sm and programs <= MAX_TILES
    assert num_tiles * tiles.columns * tiles.splits >= inputs
    assert 3 <= stages <= num_tiles
    assert stages * (tiles.rows + tiles.outs * (1 + gated)) * tiles.columns * 2 <= SHARED_BYTES // tiles.an_sm
    assert not (gated and tiles.splits > 1)


@pytest.mark.parametrize(
    ("rows", "outs", "inputs"),
    [
        (1, 4096, 1024),
        (MAX_ROWS + 1, 4096, 1024),
        (64, 4096, 1028),
        (64, 4100, 1024),
        (64, 4096, 256),
        (64, 151936, 1024),
    ],
)
def test_other_matmuls_stay_where_they_were(rows: int, outs: int, inputs: int) -> None:
    assert choose_hopper_tiles(rows, outs, inputs, False, H200_SMS) is None


def test_gated_matmuls_too_narrow_for_most_sms_stay_where_they_were() -> None:
    assert choose_hopper_tiles(8, 1536, 4096, True, H200_SMS) is None  # qwen3-8b's on one of 8 ranks


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 48, 130, 256, 257])
def test_there_is_memory_for_every_row_that_tiles_read(rows: int) -> None:
    x = empty_matmul_input(torch.empty(1, dtype=BF16), rows, 2, 512)
    assert x.shape == (rows, 2, 512) and x.dtype == BF16 and x.is_contiguous()
    for outs, inputs, gated in SHAPES:
        if tiles := choose_hopper_tiles(rows, outs, inputs, gated, H200_SMS):
            read = triton.cdiv(rows, tiles.rows) * tiles.rows
            assert x.untyped_storage().nbytes() >= read * 1024 * 2
            assert hopper_linear.descriptor(x.view(rows, 1024), tiles.rows, tiles.columns, read).shape == [
                read,
                1024,
            ]
            alone = torch.empty(rows, 1024, dtype=BF16)  # no memory behind it: nothing is read there
            assert hopper_linear.descriptor(alone, tiles.rows, tiles.columns, read).shape == [rows, 1024]
            there_is_room = (1 + read) * 1024 * 2 <= x.untyped_storage().nbytes()
            later = hopper_linear.descriptor(x.view(rows, 1024)[1:], tiles.rows, tiles.columns, read)
            assert later.shape[0] == (read if there_is_room else rows - 1)


def _launch_normed(outs: int, inputs: int, gated: bool, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        x, weight = torch.empty(1, inputs, dtype=dtype), torch.empty(outs * (1 + gated), inputs, dtype=dtype)
        linear.add_norm_linear(
            None, x, torch.empty(inputs, dtype=dtype), 1e-6, weight, None, "silu" if gated else None
        )


def _launch(
    rows: int, outs: int, inputs: int, gated: bool, dtype: torch.dtype, with_bias: bool, add: bool
) -> None:
    with torch.device("meta"):
        x, weight = (
            torch.empty(rows, inputs, dtype=dtype),
            torch.empty(outs * (1 + gated), inputs, dtype=dtype),
        )
        bias = torch.empty(len(weight), dtype=dtype) if with_bias else None
        if add:
            linear.linear_add(x, weight, bias, torch.empty(rows, outs, dtype=dtype))
        else:
            (linear.linear_gated if gated else linear.linear)(x, weight, bias)


def _target(device: torch.device) -> GPU:
    return GPU(H200_SMS, triton.runtime.driver.active.get_current_target().arch == 90)


for rows in (8, 16, 32, 64, 128, 256):  # each kernel once
    for outs, inputs, gated in SHAPES:
        if tiles := choose_hopper_tiles(rows, outs, inputs, gated, H200_SMS):
            odd = outs % 16 > 0
            stages = tiles.stages(inputs, gated)
            for add in (False, True)[: 2 - gated]:
                case = (
                    f"{tiles.rows} x {tiles.outs} x {tiles.columns} {stages=} {tiles.splits=} {gated=} "
                    f"{odd=} {add=}"
                )
                LAUNCHES.setdefault(
                    case, partial(_launch, rows, outs, inputs, gated, FP16 if odd else BF16, odd, add)
                )

for size, inputs, dtype in ((3072, 1024, BF16), (1096, 584, FP16)):
    LAUNCHES[f"gate and up, {size} x {inputs}, many rows"] = partial(
        _launch, dispatch.Limits().gated_rows, size, inputs, True, dtype, False, False
    )

for outs, inputs, gated, dtype in (
    (6144, 4096, False, BF16),
    (12288, 4096, True, BF16),
    (9728, 2560, True, FP16),
):
    LAUNCHES[f"one row with its norm, {outs} x {inputs} {gated=} {dtype}"] = partial(
        _launch_normed, outs, inputs, gated, dtype
    )

for outs, inputs, gated, dtype in (
    (4096, 4096, False, BF16),
    (4096, 12288, False, BF16),
    (2560, 9728, False, FP16),
    # gated: with a bias, else added
    (25600, 5120, True, BF16),
    (5120, 25600, False, BF16),
):
    LAUNCHES[f"one row, {outs} x {inputs} {gated=} {dtype}"] = partial(
        _launch, 1, outs, inputs, gated, dtype, gated, not gated
    )


def _launch_ring(weight: Weight, outs: int, inputs: int, gated: bool, with_bias: bool, add: bool) -> None:
    x, residual = torch.empty(1, inputs, dtype=BF16), torch.empty(1, outs, dtype=BF16) if add else None
    bias = torch.empty(outs * (1 + gated), dtype=BF16) if with_bias else None
    hopper_row.hopper_row_matmul(x, weight, bias, gated, residual)


def _launch_fp8_row(outs: int, inputs: int, gated: bool, group: int, add: bool) -> None:
    if not _target(torch.device("cpu")).hopper:
        return
    with torch.device("meta"):
        data = torch.empty(outs * (1 + gated), inputs, dtype=torch.float8_e4m3fn)
        scales = torch.empty(triton.cdiv(inputs, group) if group else 1, len(data))
        _launch_ring(Fp8Matrix(data, scales, group), outs, inputs, gated, True, add)


def _launch_int4_row(outs: int, inputs: int, gated: bool, minima: bool, add: bool) -> None:
    if not _target(torch.device("cpu")).hopper:
        return
    with torch.device("meta"):
        tiles = triton.cdiv(outs * (1 + gated), 16)
        words = torch.empty(tiles, inputs // 64, 32, 4, dtype=torch.int32)
        scales = torch.empty(tiles, inputs // 128, 8, dtype=torch.int32)
        weight = TiledWeight(
            (16 * tiles, inputs), BF16, 4, False, 128, words, scales, scales if minima else None
        )
        _launch_ring(weight, outs, inputs, gated, False, add)


for outs, inputs, gated, odd in (
    (4096, 4096, False, False),
    (4096, 12288, False, True),
    (12288, 4096, True, False),
    (12288, 5120, True, True),
):
    LAUNCHES[f"one row in fp8, {outs} x {inputs} {gated=} {odd=}"] = partial(
        _launch_fp8_row, outs, inputs, gated, 128 * odd, not gated
    )
    LAUNCHES[f"one row of 4 bits, {outs} x {inputs} {gated=} {odd=}"] = partial(
        _launch_int4_row, outs, inputs, gated, odd, not gated
    )

if not triton.knobs.runtime.interpret:  # this file once more, in the process that compiles
    dispatch.gpu_of = _target


@pytest.mark.parametrize("case", LAUNCHES)
@pytest.mark.slow
def test_compiles_for_hopper_without_spills(compiled, case: str) -> None:
    kernels = [kernel for kernel in compiled[case] if kernel.name.startswith("hopper_")]
    assert [kernel.capability for kernel in kernels] == [90]
    check_kernels(kernels)


@pytest.mark.slow
def test_an_sm_has_one_program_of_a_ring(compiled) -> None:
    rings = [
        kernel
        for case, kernels in compiled.items()
        for kernel in kernels
        if kernel.name == "hopper_row_kernel" and "4 bits" not in case
    ]
    assert len(rings) == 12 and all(2 * kernel.shared > SHARED_LIMIT[90] for kernel in rings)
