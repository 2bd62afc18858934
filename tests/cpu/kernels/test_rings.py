"""The rings of one row of fewer bits, run as numbers (gluon_numbers.py), against the matmul in float64: odd sizes,
programs with several strips of outputs, and each thing that stands before and after the matmul."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from gluon_numbers import FP8, Machine, Value, load

from shoal.kernels import reference
from shoal.kernels.matmul.dispatch import GPU
from shoal.kernels.matmul.gpu_weight import GpuWeight, pack
from shoal.kernels.quant.int4_tensor import Int4Tensor

BF16 = torch.bfloat16
EPS = 1e-6


def row_epilogue(result, up, bias_ptr, out, O, dtype, GATED):
    def biased(sums, first):
        if bias_ptr is None:
            return sums.data
        at = (out.data + first).clamp(max=len(bias_ptr.memory) - 1)
        return sums.data + bias_ptr.memory[at].float()

    gate = biased(result, 0)
    if not GATED:
        return Value(gate.to(dtype))
    rounded = gate.to(dtype).float(), biased(up, int(O)).to(dtype).float()
    return Value((F.silu(rounded[0]) * rounded[1]).to(dtype))


def rings(sms: int) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
    machine = Machine()
    names = dict(row_epilogue=row_epilogue, dispatch=types.SimpleNamespace(gpu_of=lambda _: GPU(sms)))
    fp8 = load(machine, "hopper_fp8_row", names)
    for name in ("OUTS", "PART", "following", "normed", "outputs", "put_row"):
        names[name] = getattr(fp8, name)
    int4 = load(machine, "hopper_int4_row", names)
    return fp8, int4


def check(run, matrix: torch.Tensor, outs: int, inputs: int, gated: bool, with_bias: bool) -> None:
    """The error is rounding alone, of a few outputs: once, or three times of a gated matmul."""
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
        out = torch.full((1, outs), float("nan"), dtype=BF16)
        run(x, bias, out, gated=gated, add=False, **options)
        assert float((out.double() - exact).norm() / exact.norm()) < (8e-3 if gated else 2.5e-3)
        if not gated:
            total = residual.clone()
            run(x, bias, total, gated=False, add=True, **options)
            assert torch.equal(total, residual + out)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "sms"),
    [(212, 1152, False, 3), (60, 2176, True, 2), (48, 1024, True, 1), (20, 4096, False, 132)],
)
def test_rows_of_fp8(outs: int, inputs: int, gated: bool, sms: int, group: int) -> None:
    print("seed", torch.manual_seed(31).initial_seed())
    rows = outs * (1 + gated)
    data = (torch.randn(rows, inputs) * 60).to(FP8)
    scales = (torch.rand(inputs // group if group else 1, rows) + 0.5) / 60 / inputs**0.5
    matrix = data.float() * scales.T.repeat_interleave(group or inputs, dim=1)
    ring, _ = rings(sms)

    def run(x, bias, out, **options):
        ring.hopper_fp8_row_matmul(x, data, scales, group, bias, out, **options)

    for with_bias in (False, True):
        check(run, matrix, outs, inputs, gated, with_bias)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("outs", "inputs", "gated", "sms"),
    [(212, 1024, False, 1), (64, 3072, True, 1), (96, 2048, True, 132), (48, 4096, False, 132)],
)
def test_rows_of_4_bits(outs: int, inputs: int, gated: bool, sms: int, zeros: bool) -> None:
    print("seed", torch.manual_seed(32).initial_seed())
    rows, groups = outs * (1 + gated), inputs // 128
    quants = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    scales = ((torch.rand(rows, groups) + 0.5) / 8 / inputs**0.5).to(BF16).float()
    # Zero points are powers of two, so that their products with scales are numbers of bf16.
    points = 1 << torch.randint(0, 5, (rows, groups), dtype=torch.uint8) if zeros else None
    tensor = Int4Tensor.of(quants, scales, points)
    weight = pack([tensor], None, torch.device("cpu"), BF16)
    assert isinstance(weight, GpuWeight) and (weight.minima is not None) == zeros
    _, ring = rings(sms)

    def run(x, bias, out, **options):
        ring.hopper_int4_row_matmul(x, weight.words, weight.scales, weight.minima, bias, out, **options)

    for with_bias in (False, True):
        check(run, tensor.dequantize(), outs, inputs, gated, with_bias)
