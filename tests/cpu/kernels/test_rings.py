"""The rings of one row, run as numbers (gluon_numbers.py), against the matmul in float64: odd sizes, programs with
several strips of outputs, and each thing that stands before and after the matmul."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gluon_numbers import FP8, Machine, Value, load

from shoal.kernels import reference
from shoal.kernels.matmul.dispatch import GPU
from shoal.kernels.matmul.gpu_weight import GpuWeight, pack
from shoal.kernels.matmul.loaders import Fp8Matrix
from shoal.kernels.matmul.tile_matmul import Weight
from shoal.kernels.quant.int4_tensor import Int4Tensor

BF16 = torch.bfloat16
EPS = 1e-6


def gate_mul(gate: Value, up: Value, activation: str, dtype: torch.dtype) -> Value:
    assert activation == "silu"
    rounded = gate.data.to(dtype).float(), up.data.to(dtype).float()
    return Value((F.silu(rounded[0]) * rounded[1]).to(dtype))


def unwritten(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype)


def ring(sms: int) -> Callable[..., torch.Tensor]:
    machine = Machine()
    loaders = vars(load(machine, "hopper_row_loaders", {}))
    names = {name: value for name, value in loaders.items() if name.isupper() or name.endswith("Loader")}
    names |= dict(gate_mul=gate_mul, dispatch=types.SimpleNamespace(gpu_of=lambda _: GPU(sms)))
    names |= dict(Fp8Matrix=Fp8Matrix, empty_matmul_input=unwritten)
    return load(machine, "hopper_row", names).hopper_row_matmul


def check(
    weight: Weight, matrix: torch.Tensor, outs: int, inputs: int, gated: bool, with_bias: bool, sms: int
) -> None:
    """The error is rounding alone, of a few outputs: once, or three times of a gated matmul."""
    matmul = ring(sms)
    x = torch.randn(1, inputs).to(BF16)
    x[0, 3] = 30
    norm = (torch.rand(inputs) + 0.5).to(BF16)
    bias = torch.randn(len(matrix)).to(BF16) if with_bias else None
    residual = torch.randn(1, outs).to(BF16)
    for normed in (False, True):
        taken = reference.rms_norm(x, norm, EPS) if normed else x
        exact = taken.double() @ matrix.double().T
        if bias is not None:
            exact += bias.double()
        if gated:
            gate, up = exact.chunk(2, dim=1)
            exact = F.silu(gate) * up
        options = dict(norm_weight_I=norm, eps=EPS) if normed else {}
        out = matmul(x, weight, bias, gated, **options)
        assert float((out.double() - exact).norm() / exact.norm()) < (8e-3 if gated else 2.5e-3)
        if not gated:
            total = residual.clone()
            assert matmul(x, weight, bias, False, total, **options) is total
            assert torch.equal(total, residual + out)


BIAS = pytest.mark.parametrize("with_bias", [False, True])


@BIAS
@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "sms"),
    [(210, 1040, False, 3), (60, 2176, True, 2), (44, 1024, True, 1), (20, 4096, False, 132)],
)
def test_rows_of_16_bits(outs: int, inputs: int, gated: bool, sms: int, with_bias: bool) -> None:
    print("seed", torch.manual_seed(30).initial_seed())
    weight = (torch.randn(outs * (1 + gated), inputs) / inputs**0.5).to(BF16)
    check(weight, weight, outs, inputs, gated, with_bias, sms)


@BIAS
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "sms"),
    [(212, 1152, False, 3), (60, 2176, True, 2), (48, 1024, True, 1), (20, 4096, False, 132)],
)
def test_rows_of_fp8(outs: int, inputs: int, gated: bool, sms: int, group: int, with_bias: bool) -> None:
    print("seed", torch.manual_seed(31).initial_seed())
    rows = outs * (1 + gated)
    data = (torch.randn(rows, inputs) * 60).to(FP8)
    scales = (torch.rand(inputs // group if group else 1, rows) + 0.5) / 60 / inputs**0.5
    matrix = data.float() * scales.T.repeat_interleave(group or inputs, dim=1)
    check(Fp8Matrix(data, scales, group), matrix, outs, inputs, gated, with_bias, sms)


@BIAS
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "sms"),
    [(212, 1024, False, 1), (64, 3072, True, 1), (96, 2048, True, 132), (48, 4096, False, 132)],
)
def test_rows_of_4_bits(outs: int, inputs: int, gated: bool, sms: int, zeros: bool, with_bias: bool) -> None:
    print("seed", torch.manual_seed(32).initial_seed())
    rows, groups = outs * (1 + gated), inputs // 128
    quants = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    scales = ((torch.rand(rows, groups) + 0.5) / 8 / inputs**0.5).to(BF16).float()
    # Zero points are powers of two, so that their products with scales are numbers of bf16.
    points = 1 << torch.randint(0, 5, (rows, groups), dtype=torch.uint8) if zeros else None
    tensor = Int4Tensor.of(quants, scales, points)
    weight = pack([tensor], None, torch.device("cpu"), BF16)
    assert isinstance(weight, GpuWeight) and (weight.minima is not None) == zeros
    check(weight, tensor.dequantize(), outs, inputs, gated, with_bias, sms)
