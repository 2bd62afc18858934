"""Matmuls of many rows with weights of 4 or 8 bits on Hopper compile as they should. tests/gpu/test_int4_gpu.py
multiplies by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_compile import log_of, needs_nvcc

from shoal.engine.runner.start_up import CUTS
from shoal.kernels.matmul import packed_rows
from shoal.kernels.matmul.dispatch import (
    GPU,
    PACKED_BLOCKS,
    After,
    Kernel,
    RowTiles,
    Shape,
    choose,
    choose_packed_rows,
)

H200 = GPU(hopper=True)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("block_rows", "bits", "group", "e2m1"),
    [
        (block, bits, group, e2m1)
        for bits, group, e2m1 in (
            (4, 128, False),
            (4, 32, False),
            (4, 16, True),
            (8, 32, False),
            (8, 16, False),
        )
        for block in PACKED_BLOCKS[bits]
    ],
)
def test_compiles_with_matmuls_beside_other_instructions(
    block_rows: int, bits: int, group: int, e2m1: bool, tmp_path: Path
) -> None:
    source = Path(packed_rows.__file__).with_suffix(".cu")
    log = log_of(source, packed_rows.constants(block_rows, bits, group, e2m1), tmp_path)
    assert log.count("0 bytes spill stores") == 2 and "serialized" not in log


def test_tiles_of_rows_leave_the_fewest_sms_idle() -> None:
    def tiles(rows: int, outs: int, inputs: int, after: After = After.NOTHING, bits: int = 4) -> object:
        return choose(
            Shape(outs, inputs, after=after, bits=bits, group=128), rows, torch.bfloat16, H200
        ).tiles

    # 64 strips are on as many SMs. Two tiles of rows, or two parts of the inputs, have work for twice as many.
    assert [tiles(rows, 4096, 4096) for rows in (33, 96, 128, 256)] == [(64, 2), (64, 1), (64, 1), (128, 1)]
    assert [tiles(rows, 4096, 12288) for rows in (64, 96, 128, 192)] == [(64, 2), (96, 2), (128, 2), (96, 1)]
    assert [tiles(rows, 6144, 4096) for rows in (64, 96, 128, 192, 256)] == [
        (n, 1) for n in (64, 96, 128, 192, 256)
    ]
    assert tiles(256, 12288, 4096, After.SILU_MUL) == (256, 1)
    assert tiles(256, 12288, 4096, After.SILU_MUL, bits=8) == (128, 1)
    # Two parts of 32 strips are for less than half of the SMs, so tile_matmul.py has 64 rows.
    assert [isinstance(tiles(rows, 2048, 4096), RowTiles) for rows in (64, 96)] == [True, False]
    assert tiles(96, 2048, 4096) == (64, 2)
    assert tiles(64, 12288, 256, After.SILU_MUL) == (64, 1)  # Adding parts would take longer than it saves.


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("after", [After.NOTHING, After.SILU_MUL])
@pytest.mark.parametrize("sms", [78, 132])
def test_steps_between_two_rehearsals_have_the_same_tiles(sms: int, after: After, bits: int) -> None:
    """Regression: steps of 65 to 96 tokens had tiles that no rehearsed step had."""
    for outs in range(64, 1 << 15, 448):
        shape = Shape(outs, 4096, after=after, bits=bits, group=128)
        for rows in range(33, 257):
            rehearsed = next(cut for cut in CUTS if cut >= rows)
            found, ready = (
                choose_packed_rows(shape, some, torch.bfloat16, H200._replace(sms=sms))
                for some in (rows, rehearsed)
            )
            assert found == ready, (outs, rows)


def test_others_take_what_the_kernel_cannot() -> None:
    def kernel(
        rows: int = 64, gpu: GPU = H200, dtype: torch.dtype = torch.bfloat16, **changes: int
    ) -> Kernel:
        return choose(
            Shape(**dict(outs=4096, inputs=4096, bits=4, group=128) | changes), rows, dtype, gpu
        ).kernel

    assert kernel() is kernel(33) is kernel(256) is kernel(group=32) is kernel(bits=8) is Kernel.HOPPER_PACKED
    others = [kernel(32), kernel(gpu=GPU()), kernel(dtype=torch.float16)]
    others += [kernel(outs=4080), kernel(inputs=4160), kernel(gpu=H200._replace(compiles=False))]
    assert set(others) == {Kernel.TILES} and kernel(257) is Kernel.UNPACKED
