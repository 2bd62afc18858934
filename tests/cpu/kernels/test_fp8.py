"""Matmuls with fp8 weights, and activations that become fp8, in Triton's interpreter, at odd shapes; what real
models bring compiles for sm_89 and, without spills, for sm_90.

Oracles are torch's own conversion to fp8 and float32 matmuls of the unpacked matrix. Tolerance: float16 rounds
a result once (2**-11 relative), a gated one three times; sums are of another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton_compile import check_kernels

from shoal.errors import CheckpointError
from shoal.kernels import reference
from shoal.kernels.matmul import fp8_linear, gpu_fp8
from shoal.kernels.matmul.dispatch import (
    GPU,
    MAX_SPLIT_TILES,
    ElementwiseTiles,
    Kernel,
    RowTiles,
    Shape,
    choose,
)
from shoal.kernels.matmul.launch import matmul_of_norm
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.matmul.tile_matmul import tile_linear
from shoal.kernels.quant.fp8_quantize import gate_mul_fp8, quantize, rms_norm_fp8
from shoal.kernels.quant.fp8_tensor import Fp8Rows, Fp8Tensor, quantize_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
CAPABILITIES = (89, 90)
LAUNCHES: dict[str, Callable[[], object]] = {}
GROUPS = pytest.mark.parametrize("group", [0, 32, 128])


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds 125.8 to 64 where the GPU rounds it to 128: it loses the carry out of the
    mantissa. Torch converts in its place."""
    convert = interpreter._convert_float

    def exact(values, input_type, output_type, rounding_mode):
        if output_type != tl.float8e4nv or input_type.primitive_bitwidth == 8:
            return convert(values, input_type, output_type, rounding_mode)
        floats = np.ascontiguousarray(values).view(f"f{input_type.primitive_bitwidth // 8}")
        return torch.from_numpy(floats).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", exact)
    print("seed", torch.manual_seed(41).initial_seed())


def tensor_of(outs: int, inputs: int, group: int) -> Fp8Tensor:
    """Results of matmuls with it are near 1."""
    size = group or inputs
    data = (torch.randn(outs, inputs) * 60).to(FP8)
    data.view(torch.uint8)[0, :6] = torch.tensor([0, 1, 7, 0x80, 0x7E, 0xFE], dtype=torch.uint8)[:inputs]
    scales = (torch.rand(outs, -(-inputs // size)) + 0.5) / 60 / inputs**0.5
    return Fp8Tensor((outs, inputs), data, scales, size)


def matrix_of(tensor: Fp8Tensor, group: int) -> Fp8Matrix:
    return Fp8Matrix(tensor.data, tensor.scales.T.contiguous(), group)


def same(ours: Fp8Rows, expected: Fp8Rows) -> None:
    assert torch.equal(ours.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(ours.scales, expected.scales)
    assert (ours.group, ours.dtype, len(ours)) == (expected.group, expected.dtype, len(expected))


@GROUPS
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (2, 130), (1, 1100), (0, 64)], ids=str)
def test_rows_become_fp8_as_torch_rounds_them(shape: tuple[int, int], dtype: torch.dtype, group: int) -> None:
    x = torch.randn(shape).mul(torch.rand(shape[0], 1) * 100).to(dtype)
    x[-1:] = 0  # a row without a largest number
    same(quantize(x, group), quantize_rows(x, group))


@GROUPS
@pytest.mark.parametrize(
    ("size", "activation"), [(1, "silu"), (130, "silu"), (1100, "silu"), (130, "gelu_tanh")]
)
def test_gate_mul_writes_what_it_would_have_rounded(size: int, activation: str, group: int) -> None:
    gate_up = torch.randn(3, 2 * size).mul(3).half()
    ours = gate_mul_fp8(gate_up, group, activation)
    expected = quantize_rows(reference.gate_mul(gate_up, activation), group)
    # exp of numpy and of torch differ by a last bit, and so may numbers at the middle between two of fp8
    torch.testing.assert_close(ours.scales, expected.scales, rtol=2e-3, atol=0)
    torch.testing.assert_close(ours.dequantize(), expected.dequantize(), rtol=0.13, atol=1e-3)
    assert (ours.data.float() == expected.data.float()).float().mean() > 0.98


@GROUPS
@pytest.mark.parametrize("size", [24, 130, 1100])
@pytest.mark.parametrize("add", [False, True])
def test_norms_write_what_they_would_have_rounded(size: int, add: bool, group: int) -> None:
    x, residual, weight = torch.randn(3, size).half(), torch.randn(3, size).half(), torch.rand(size).half()
    total = x + residual if add else residual.clone()
    ours = rms_norm_fp8(x if add else None, residual, weight, 1e-6, group)
    expected = quantize_rows(reference.rms_norm(total, weight, 1e-6), group)
    assert torch.equal(residual, total)
    torch.testing.assert_close(ours.scales, expected.scales, rtol=2e-3, atol=0)
    torch.testing.assert_close(ours.dequantize(), expected.dequantize(), rtol=0.13, atol=1e-3)
    assert (ours.data.float() == expected.data.float()).float().mean() > 0.98


@GROUPS
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("outs", "inputs"), [(2, 1), (14, 37), (70, 300)])
@pytest.mark.parametrize("rows", [1, 5, 66])
def test_matmuls_equal_those_of_the_unpacked_matrix(
    rows: int, outs: int, inputs: int, bias: bool, group: int
) -> None:
    """Up to 64 rows are multiplied as they are; more, as what their fp8 numbers stand for."""
    tensor, x = tensor_of(outs, inputs, group), torch.randn(rows, inputs).half()
    matrix, b = matrix_of(tensor, group), torch.randn(outs).half() if bias else None
    taken = quantize_rows(x, group).dequantize() if rows > 64 else x.float()
    want = taken @ tensor.dequantize().T + (0 if b is None else b.float())
    y = fp8_linear.fp8_linear(x, matrix, b)
    assert y.shape == (rows, outs) and y.dtype == FP16
    torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=1e-3)
    residual = torch.randn(rows, outs).half()
    added = residual.clone()
    assert fp8_linear.fp8_linear(x, matrix, b, added) is added
    assert torch.equal(added, residual + y)
    gated = fp8_linear.fp8_linear_gated(x, matrix, b)
    torch.testing.assert_close(gated.float(), reference.gate_mul(want), rtol=4e-3, atol=2e-3)


@GROUPS
def test_float32_rows_are_multiplied_as_exactly_as_float32_does(group: int) -> None:
    tensor, x = tensor_of(14, 300, group), torch.randn(16, 300)
    for rows in (1, 16):
        y = fp8_linear.fp8_linear(x[:rows], matrix_of(tensor, group), None)
        torch.testing.assert_close(y, x[:rows] @ tensor.dequantize().T, rtol=1e-5, atol=1e-5)


@GROUPS
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("inputs", [300, 2048, 3100, 5200])
def test_one_row_of_one_to_many_tiles_and_its_norm(inputs: int, activation: str | None, group: int) -> None:
    """All tiles of a plain matmul are in registers, up to four. The norm of at most 2048 inputs is inside."""
    tensor, x = tensor_of(14, inputs, group), torch.randn(1, inputs).half()
    matrix, b, norm = matrix_of(tensor, group), torch.randn(14).half(), torch.rand(inputs).half()

    def check(ours: torch.Tensor | Fp8Rows, row: torch.Tensor) -> None:
        exact = row.float() @ tensor.dequantize().T + b.float()
        expected = reference.gate_mul(exact) if activation else exact
        assert isinstance(ours, torch.Tensor)
        torch.testing.assert_close(ours.float(), expected, rtol=4e-3, atol=3e-3)

    linear = fp8_linear.fp8_linear_gated if activation else fp8_linear.fp8_linear
    check(linear(x, matrix, b), x)
    of_norm = matmul_of_norm(x, norm, 1e-6, matrix, b, activation)
    assert (of_norm is None) == (inputs > 2048)
    if of_norm is not None:
        check(of_norm, reference.rms_norm(x, norm, 1e-6))
    assert matmul_of_norm(x, norm, 1e-6, matrix, b, "gelu_tanh") is None


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_whole_tiles_go_from_memory_to_tensor_cores_as_they_lie(rows: int, group: int) -> None:
    """The order of inputs that threads make of it is the same for rows and weights."""
    tensor, x = tensor_of(256, 384, group), torch.randn(rows, 384).half()
    matrix, b = matrix_of(tensor, group), torch.randn(256).half()
    exact = x.float() @ tensor.dequantize().T + b.float()
    torch.testing.assert_close(fp8_linear.fp8_linear(x, matrix, b).float(), exact, rtol=2e-3, atol=2e-3)
    gated = fp8_linear.fp8_linear_gated(x, matrix, b)
    assert isinstance(gated, torch.Tensor)
    torch.testing.assert_close(gated.float(), reference.gate_mul(exact), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@GROUPS
def test_split_inputs_are_added_by_the_last_to_arrive(gated: bool, splits: int, group: int) -> None:
    """Five splits of three tiles: two of them have nothing to add. The counters are zeros afterwards."""
    tensor, x = tensor_of(70, 300, group), torch.randn(17, 300).half()
    tiles = RowTiles(16, 32, min(128, group or 128), 4, 3, splits)
    residual = None if gated else torch.randn(17, 70).half()
    want = x.float() @ tensor.dequantize().T
    for _ in range(2):
        added = None if residual is None else residual.clone()
        out = tile_linear(tiles, x, matrix_of(tensor, group), None, gated, added)
        expected = reference.gate_mul(want) if residual is None else residual + want
        torch.testing.assert_close(out.float(), expected.float(), rtol=4e-3, atol=4e-3)
    assert not arrival_counters("tile_matmul", MAX_SPLIT_TILES, x.device).any()


@pytest.mark.parametrize("tiles", [RowTiles(16, 16, 32, 1, 2), RowTiles(32, 64, 64, 4, 2)], ids=str)
@GROUPS
def test_any_tiles_of_many_rows_give_the_matmul(tiles: RowTiles, group: int) -> None:
    if group % tiles.columns:
        pytest.skip("a tile has one scale")
    tensor, rows = tensor_of(70, 300, group), quantize_rows(torch.randn(45, 300).half(), group)
    room = torch.full((47, 70), 7.0).half()
    fp8_linear._many(tiles, rows, matrix_of(tensor, group), None, room[1:46], False)
    want = rows.dequantize() @ tensor.dequantize().T
    torch.testing.assert_close(room[1:46].float(), want, rtol=2e-3, atol=1e-3)
    assert (room[0] == 7).all() and (room[46] == 7).all()


def test_nothing_is_written_beyond_few_rows() -> None:
    tensor, x, room = tensor_of(21, 50, 0), torch.randn(5, 50).half(), torch.full((7, 21), 7.0).half()
    for rows in (1, 5):
        fp8_linear.fp8_linear(x[:rows], matrix_of(tensor, 0), None, room[1 : 1 + rows])
        assert (room[0] == 7).all() and (room[1 + rows :] == 7).all() and (room[1 : 1 + rows] != 7).all()


def test_a_matmul_of_no_rows_is_empty() -> None:
    matrix, x = matrix_of(tensor_of(14, 37, 0), 0), torch.zeros(0, 37).half()
    assert fp8_linear.fp8_linear(x, matrix, None).shape == (0, 14)
    assert fp8_linear.fp8_linear_gated(x, matrix, None).shape == (0, 7)


def test_merged_parts_lie_in_order_and_new_ones_at_their_place() -> None:
    parts = [tensor_of(3, 64, 32), tensor_of(5, 64, 32)]
    weight = gpu_fp8.pack(parts)
    whole = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(weight.embed(torch.arange(8)), whole)
    new = [tensor_of(3, 64, 32), tensor_of(5, 64, 32)]
    weight.write(3, new[1])
    assert torch.equal(weight.embed(torch.arange(8)), torch.cat([whole[:3], new[1].dequantize()]))
    again = gpu_fp8.pack(new, weight)
    assert again.matrix.data.data_ptr() == weight.matrix.data.data_ptr()
    assert torch.equal(
        again.embed(torch.tensor([7, 0])), torch.stack([new[1].dequantize()[4], new[0].dequantize()[0]])
    )


@pytest.mark.parametrize("group", [16, 48])
def test_groups_without_a_matmul_are_refused(group: int) -> None:
    with pytest.raises(
        CheckpointError, match=f"blocks of {group} inputs.*power of two from 32.*name a dtype"
    ):
        gpu_fp8.pack([tensor_of(4, 96, group)])


def _matrix(outs: int, inputs: int, group: int) -> Fp8Matrix:
    groups = -(-inputs // (group or inputs))
    return Fp8Matrix(torch.empty(outs, inputs, dtype=FP8), torch.empty(groups, outs), group)


def _launch(rows: int, outs: int, inputs: int, group: int) -> None:
    with torch.device("meta"):  # only compiled
        x, matrix = torch.empty(rows, inputs, dtype=BF16), _matrix(outs, inputs, group)
        bias = torch.empty(outs, dtype=BF16)
        fp8_linear.fp8_linear(x, matrix, bias)
        fp8_linear.fp8_linear(x, matrix, None, torch.empty(rows, outs, dtype=BF16))
        fp8_linear.fp8_linear_gated(x, matrix, None, fp8_linear.fp8_group(matrix, rows))


def _quantize(size: int, group: int) -> None:
    with torch.device("meta"):
        x = torch.empty(300, 2 * size, dtype=BF16)
        gate_mul_fp8(x, group)
        quantize(x[:, :size].contiguous(), group)
        if size <= 16384:
            half = x[:, :size].contiguous()
            rms_norm_fp8(half, half, torch.empty(size, dtype=BF16), 1e-6, group)
            rms_norm_fp8(None, half, torch.empty(size, dtype=BF16), 1e-6, group)


for group in (0, 128):
    for size in (576, 4096, 29568):
        LAUNCHES[f"quantize {size} by {group}"] = lambda size=size, group=group: _quantize(size, group)
    for case in (
        (1, 12288, 4096),
        (8, 12288, 4096),
        (64, 12288, 4096),
        (4096, 12288, 4096),
        (300, 1536, 576),
    ):
        LAUNCHES[f"{case} by {group}"] = lambda case=case, group=group: _launch(*case, group)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles_for_hopper_without_spills_and_for_ada(compiled, case: str) -> None:
    """Returns the number of stages for Ada's shared memory, as an Ada would be asked."""
    check_kernels([kernel for kernel in compiled[case] if kernel.capability == 90])
    assert not any(kernel.error for kernel in compiled[case])


# Which kernel

H200 = GPU(132, True)


@pytest.mark.parametrize(
    ("outs", "inputs", "rows", "kernel", "tiles"),
    [
        (6144, 4096, 1, Kernel.HOPPER_ROW, None),
        (6144, 4104, 1, Kernel.ELEMENTWISE, ElementwiseTiles(4, 1024, 4)),
        (4096, 1024, 1, Kernel.ELEMENTWISE, ElementwiseTiles(4, 1024, 4)),
        (6144, 4096, 2, Kernel.TILES, RowTiles(16, 64, 128, 4, 4, 5, early=2)),
        (1024, 1024, 16, Kernel.TILES, RowTiles(16, 64, 128, 4, 3, 4)),
        (4096, 12288, 16, Kernel.TILES, RowTiles(16, 64, 128, 4, 5, 8, early=2)),
        (4096, 4096, 17, Kernel.FP8_TORCH, RowTiles(64, 64, 128, 4, 4)),
        (24576, 4096, 65, Kernel.FP8_TORCH, RowTiles(128, 128, 128, 8, 4)),
        (4096, 4096, 300, Kernel.FP8_TORCH, RowTiles(128, 64, 128, 4, 4)),
        (4090, 4096, 4096, Kernel.FP8_MANY, RowTiles(128, 128, 128, 8, 4)),
    ],
)
def test_the_number_of_rows_names_the_kernel_and_the_sms_its_tiles(
    outs: int, inputs: int, rows: int, kernel: Kernel, tiles: ElementwiseTiles | RowTiles | None
) -> None:
    chosen = choose(Shape(outs, inputs), rows, FP8, H200)
    assert (chosen.kernel, chosen.tiles) == (kernel, tiles)
    for group in (32, 128):
        of_groups = choose(Shape(outs, inputs, group=group), rows, FP8, H200)
        others = {Kernel.FP8_TORCH: Kernel.FP8_MANY, Kernel.HOPPER_ROW: Kernel.ELEMENTWISE}
        has_groups = group == 128 and (kernel is Kernel.HOPPER_ROW or rows % 4 == 0)
        assert of_groups.kernel is (kernel if has_groups else others.get(kernel, kernel))
        assert rows == 1 or (of_groups.tiles is not None and of_groups.tiles.columns == group)


def test_torch_multiplies_what_it_can_on_hopper() -> None:
    def kernel(gpu: GPU = H200, rows: int = 100, **changes: Any) -> Kernel:
        return choose(Shape(**dict(outs=4096, inputs=4096) | changes), rows, FP8, gpu).kernel

    assert kernel() is kernel(bias=True) is kernel(group=128) is Kernel.FP8_TORCH
    assert kernel(GPU(132, False)) is kernel(inputs=4104) is Kernel.FP8_MANY
    assert kernel(group=128, bias=True) is kernel(group=128, inputs=4160) is Kernel.FP8_MANY
    assert kernel(group=128, rows=101) is Kernel.FP8_MANY


def test_fewer_sms_need_fewer_splits() -> None:
    splits = [choose(Shape(4096, 4096), 8, FP8, GPU(sms)).tiles.splits for sms in (20, 46, 84, 132)]
    assert splits == [1, 2, 5, 8]
