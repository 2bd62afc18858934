"""Small matmuls in Triton's interpreter against float32, odd shapes; what real models bring compiles for
sm_80 and sm_90 without spills.

Tolerance: weights are scaled so that results are near 1; sums of float16 products are exact to float32, one
rounding is 2**-11 relative, a gated result has three.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton
from triton_compile import check_kernels

from shoal.kernels import reference
from shoal.kernels.matmul import linear
from shoal.kernels.matmul import reference as matmul_reference
from shoal.kernels.matmul.dispatch import GPU, After, ElementwiseTiles, Kernel, RowTiles, Shape, choose
from shoal.kernels.matmul.elementwise import elementwise_matmul
from shoal.kernels.matmul.shared_memory import fitting_stages
from shoal.kernels.matmul.tile_matmul import tile_linear

BF16, FP16 = torch.bfloat16, torch.float16
FEW_ROWS = Kernel.ELEMENTWISE, Kernel.TILES
LAUNCHES: dict[str, Callable[[], object]] = {}


def operands(
    rows: int, outs: int, columns: int, bias: bool, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    print("seed", torch.manual_seed(31).initial_seed())
    weight = torch.randn(outs * (1 + gated), columns).div(columns**0.5).to(FP16)
    return torch.randn(rows, columns).to(FP16), weight, torch.randn(len(weight)).to(FP16) if bias else None


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return F.silu(y.chunk(2, dim=1)[0]) * y.chunk(2, dim=1)[1] if gated else y


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("outs", "columns"), [(1, 1), (7, 13), (130, 70), (48, 1024), (33, 1100), (5, 2049), (3, 3600)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_matmuls_equal_exact_ones(rows: int, outs: int, columns: int, bias: bool, gated: bool) -> None:
    x, weight, b = operands(rows, outs, columns, bias, gated)
    shape = Shape(outs, columns, after=After.SILU_MUL if gated else After.NOTHING, bias=bias)
    assert choose(shape, rows, FP16, GPU()).kernel in FEW_ROWS
    ours = (linear.linear_gated if gated else linear.linear)(x, weight, b)
    assert ours.shape == (rows, outs) and ours.dtype == FP16
    torch.testing.assert_close(ours.float(), exact(x, weight, b, gated), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("outs", [1, 37, 1100])
def test_many_rows_with_unaligned_outputs_are_padded(outs: int, bias: bool) -> None:
    x, weight, b = operands(1200, outs, 64, bias, False)
    ours = linear.linear(x, weight, b)
    assert ours.shape == (1200, outs) and ours.is_contiguous()
    torch.testing.assert_close(ours.float(), exact(x, weight, b, False), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("outs", "columns"), [(1, 1), (7, 13), (130, 70), (48, 1024), (33, 1100), (5, 2049), (3, 3600)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_a_matmul_that_adds_itself_rounds_twice(rows: int, outs: int, columns: int, bias: bool) -> None:
    x, weight, b = operands(rows, outs, columns, bias, False)
    residual = torch.randn(rows, outs).to(FP16)
    expected = residual + linear.linear(x, weight, b)
    assert linear.linear_add(x, weight, b, residual) is None
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("outs", "columns"), [(7, 13), (48, 1024), (33, 1100), (5, 2049)])
@pytest.mark.parametrize("rows", [1, 3, 5, 70])
def test_sum_norm_and_matmul_equal_exact_ones(rows: int, outs: int, columns: int, gated: bool) -> None:
    x, weight, bias = operands(rows, outs, columns, True, gated)
    residual, norm_weight = torch.randn(rows, columns).to(FP16), torch.rand(columns).to(FP16)
    total = x + residual
    normed = reference.rms_norm(total.float(), norm_weight.float(), 1e-6)
    ours, ours_total = linear.add_norm_linear(
        x, residual, norm_weight, 1e-6, weight, bias, "silu" if gated else None
    )
    assert torch.equal(ours_total, total)
    torch.testing.assert_close(ours.float(), exact(normed, weight, bias, gated), rtol=2e-3, atol=2e-3)
    kept = total.clone()
    of_the_sum, unchanged = linear.add_norm_linear(
        None, total, norm_weight, 1e-6, weight, bias, "silu" if gated else None
    )
    assert torch.equal(of_the_sum, ours) and unchanged is total and torch.equal(total, kept)


@pytest.mark.parametrize("outs", [1, 7, 128])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1024), (1, 1100), (1, 2100), (3, 100)])
def test_a_norm_is_returned_with_its_matmul(rows: int, columns: int, outs: int) -> None:
    x, weight, bias = operands(rows, outs, columns, True, False)
    norm_weight = torch.rand(columns).to(FP16)
    normed, ours = linear.norm_linear(x, norm_weight, 1e-6, weight, bias)
    assert torch.equal(normed, linear.rms_norm(x, norm_weight, 1e-6))
    torch.testing.assert_close(ours.float(), exact(normed.float(), weight, bias, False), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "tiles",
    [
        ElementwiseTiles(2, 64, 1),
        RowTiles(32, 16, 16, 4, 2),
        RowTiles(16, 32, 64, 4, 3),
        RowTiles(32, 16, 32, 4, 2, 3),
    ],
    ids=str,
)
def test_any_tiles_give_the_matmul(tiles: ElementwiseTiles | RowTiles) -> None:
    multiply = tile_linear if isinstance(tiles, RowTiles) else elementwise_matmul
    x, weight, bias = operands(21, 45, 100, True, True)
    torch.testing.assert_close(
        multiply(tiles, x, weight, bias, True).float(), exact(x, weight, bias, True), rtol=2e-3, atol=1e-3
    )
    residual = torch.randn(21, 90).to(FP16)
    expected = residual + multiply(tiles, x, weight, bias, False)
    assert multiply(tiles, x, weight, bias, False, residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize(("rows", "dtype"), [(0, FP16), (65, FP16), (3, torch.float32)])
def test_other_matmuls_are_torchs(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (t.to(dtype) for t in operands(rows, 6, 10, True, False))
    assert torch.equal(linear.linear(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(
        linear.linear_gated(x, weight, bias),
        matmul_reference.linear_gated(x, weight, bias),
        rtol=2e-3,
        atol=1e-5,
    )
    for b in (None, bias):
        residual = torch.randn(rows, 6).to(dtype)
        expected = residual.clone()
        left = linear.linear_add(x, weight, b, residual)
        residual += 0 if left is None else left
        matmul_reference.linear_add(x, weight, b, expected)
        # one rounding, or two
        torch.testing.assert_close(residual, expected, rtol=2e-3, atol=1e-3 if dtype == FP16 else 1e-5)


def test_a_matmul_of_many_rows_and_inputs_is_left_to_the_next_norm() -> None:
    x, weight, residual = (
        torch.randn(300, 12288, dtype=FP16),
        torch.randn(4, 12288, dtype=FP16),
        torch.zeros(300, 4, dtype=FP16),
    )
    assert torch.equal(linear.linear_add(x, weight, None, residual), F.linear(x, weight))  # type: ignore[arg-type]
    assert (
        linear.linear_add(x[:, :4096].contiguous(), weight[:, :4096].contiguous(), None, residual) is None
        and residual.any()
    )


def test_matmuls_of_two_threads_leave_torchs_flags_as_they_were() -> None:
    """Regression: the thread that began second saved the flags that the first had switched off, and the last
    one to restore its own left them off for the whole process."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    began, may_end = threading.Event(), threading.Event()

    def second() -> None:
        with linear._exact_sums(num_outs=9):
            began.set()
            may_end.wait()

    thread = threading.Thread(target=second)
    try:
        with linear._exact_sums(num_outs=9):
            thread.start()
            began.wait(0.2)
        may_end.set()
        thread.join()
        after = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
        assert after == before
    finally:
        may_end.set()
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before


def test_nothing_is_written_beyond_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands(3, 21, 50, False, False)
    room = torch.full((10, 21), 7.0, dtype=FP16)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, shape, **o: room[1:9] if shape == (8, 21) else new_empty(self, shape, **o),
    )
    linear.linear(x, weight, None)
    assert (room[0] == 7).all() and (room[4:] == 7).all() and (room[1:4] != 7).all()
    linear.linear_add(x, weight, None, room[1:4])
    assert (room[0] == 7).all() and (room[4:] == 7).all() and (room[1:4] != 7).all()


def _launch(rows: int, outs: int, columns: int, gated: bool, dtype: torch.dtype) -> None:
    with torch.device("meta"):  # only compiled: a vocabulary's weight need not exist
        weight, x = (
            torch.empty(outs * (1 + gated), columns, dtype=dtype),
            torch.empty(rows, columns, dtype=dtype),
        )
        matmul, bias = (
            linear.linear_gated if gated else linear.linear,
            torch.empty(len(weight), dtype=dtype) if outs == 3072 else None,
        )
        matmul(x, weight, bias)
        linear.add_norm_linear(x, x, x[0], 1e-6, weight, None, "silu" if gated else None)
        linear.add_norm_linear(None, x, x[0], 1e-6, weight, None, "silu" if gated else None)
        if not gated:
            linear.norm_linear(x, x[0], 1e-6, weight, None)
            linear.linear_add(x, weight, bias, torch.empty(rows, outs, dtype=dtype))


for shape in (
    (4096, 1024, False),
    (3072, 1024, True),
    (1024, 3072, False),
    (1024, 2048, False),
    (12288, 4096, True),
    (4096, 12288, False),
    (151936, 1024, False),
    (1536, 576, True),
    (1, 2048, False),
    (128, 2048, False),
    (1, 1, False),
):
    of_choice = Shape(*shape[:2], after=After.SILU_MUL if shape[2] else After.NOTHING)
    for rows in (
        rows for rows in (1, 2, 4, 16, 32) if choose(of_choice, rows, BF16, GPU()).kernel in FEW_ROWS
    ):
        LAUNCHES[f"{rows} rows {shape}"] = lambda rows=rows, shape=shape: _launch(
            rows, *shape, FP16 if shape[1] == 576 else BF16
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles_for_both_targets_without_spills(compiled, case: str) -> None:
    check_kernels(compiled[case])


@pytest.mark.parametrize(("room", "stages"), [(101_376, 3), (166_912, 5), (232_448, 5), (20_000, 1)])
def test_pipelines_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch, room: int, stages: int) -> None:
    """99 KB on consumer cards, 163 on an A100, 227 on an H100; a gated matmul of 16 rows buffers 36 KB a
    stage."""
    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": room})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: room, utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    assert fitting_stages(5, (2 * 64 + 16) * 128 * 2, torch.device("cuda")) == stages
